"""Few-shot episodes from classes of images that are in memory or mapped."""

import functools
import itertools
import logging
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from metadist.errors import UserError
from metadist.metrics import counted
from metadist.tasks.episode import SPLITS, Episode, EpisodeDescription, Examples
from metadist.tasks.images_on_device import ImagesOnDevice, fits_on_device
from metadist.tasks.transforms import (
    Augment,
    ImageTransform,
    Normalize,
    apply_transforms,
    transform_names,
)

ROTATIONS = 4
"""Rotations by 0, 90, 180 and 270 degrees."""

_MAX_NAMED = 8
"""The most classes that a message lists."""

_log = logging.getLogger(__name__)


class _Draw(NamedTuple):
    """The random choices of an episode, apart from augmentation."""

    classes: np.ndarray  # (ways,), indices of base classes
    examples: list[np.ndarray]  # for each class (shots + queries,)
    rotations: np.ndarray  # (ways,), in quarter turns


class ImageClasses:
    """Images by class, divided into splits; the base class of every image dataset.

    Classes may have unequal numbers of images.

    With rotations a class is a base class rotated by 0, 90, 180 or 270 degrees: each rotation is a
    class of its own (Santoro et al. 2016, arXiv 1605.06065). As in the code of MAML (Finn et al.
    2017, arXiv 1703.03400) the classes of a task come from different base classes, each with a
    random rotation, since rotations of a symmetric character may be equal. Only sampled images are
    rotated.

    Attributes:
        input_shape: (channels, height, width); 1 channel for images of grey values.
        regression: False.
        inverted: whether the pixels of the image files were inverted (255 - pixel). A subclass that
            inverts them sets it to True, so that images to be predicted are inverted as well.
    """

    regression = False
    inverted = False
    group = "group"
    without_groups = "groups=None"
    without_small_classes = "remove these classes"
    """For messages: a group, the option to sample across groups, and how to leave out classes with
    few examples."""

    def __init__(
        self,
        name: str,
        images: np.ndarray | Sequence[np.ndarray],
        splits: Mapping[str, np.ndarray],
        rotations: bool = False,
        test_rotations: bool = False,
        groups: Sequence[str] | None = None,
        normalize: Normalize | None = None,
        augment: Augment | None = None,
        transforms: Sequence[ImageTransform] = (),
        class_names: Sequence[str] | None = None,
        skip_small_classes: bool = False,
        test_drawers: bool = False,
    ) -> None:
        """Take images and their splits. Images are not copied.

        Args:
            name: the dataset's name in `protocol`.
            images: uint8 of shape (classes, examples, height, width) or (classes, examples,
                channels, height, width); or a sequence with one such array per class, where classes
                may have unequal numbers of examples. May be a memory map; is never written to.
            splits: for each split in `metadist.tasks.episode.SPLITS` the indices of its base
                classes in `images`, int64 of shape (classes of the split,).
            rotations: whether rotated training classes are separate classes.
            test_rotations: the same for validation and test.
            groups: the group of each base class, such as its alphabet; all classes of a task
                then come from one group, sampled uniformly from the groups that are large enough.
                None for tasks across groups.
            normalize: normalization of every image; None for none.
            augment: augmentation of training images, before normalization; None for none.
            transforms: further augmentation of training images, in this order, after `augment` and
                before normalization; see `metadist.tasks.transforms.apply_transforms`.
            class_names: the name of each base class, for messages and `describe`. `describe` omits
                the part before the first slash, such as the split in `test/dog`. Default: its
                index.
            skip_small_classes: whether classes with fewer examples than a task needs are left out
                of the tasks, instead of being an error.
            test_drawers: whether all classes of a validation or test task use the same example
                indices. If an example index stands for a drawer, one person then drew the k-th
                images of all classes.

        Raises:
            UserError: `normalize` does not fit the channels; `test_drawers`, `class_names` or
                `groups` do not fit the classes; the channels come last; a split is missing, has
                values other than class indices, or repeats a class of its own or of another split.
            ValueError: `images` has another type or shape, or images to be rotated are not square.
        """
        # Plain views: indexing np.memmap itself is slower and yields np.memmap again.
        self.images = (
            np.asarray(images) if isinstance(images, np.ndarray) else [*map(np.asarray, images)]
        )
        self.class_sizes = np.array([len(class_images) for class_images in self.images])
        self.input_shape = _checked_shape(name, self.images, rotations or test_rotations)
        self.name = name
        self.splits = _checked_splits(name, splits, len(self.images))
        for argument, values in {"class_names": class_names, "groups": groups}.items():
            if values is not None and len(values) != len(self.images):
                raise UserError(
                    f"{name} has {len(self.images)} classes and {len(values)} {argument}: give one "
                    "for each class."
                )
        self.rotations = rotations
        self.test_rotations = test_rotations
        self.normalize = normalize or Normalize()
        self.normalize.check(self.input_shape[0])
        self.augment = augment or Augment()
        self.transforms = transforms
        self.class_names = None if class_names is None else [str(name) for name in class_names]
        self.skip_small_classes = skip_small_classes
        self.test_drawers = test_drawers
        if test_drawers and len(sizes := {*self.class_sizes.tolist()}) > 1:
            raise UserError(
                f"test_drawers needs the same number of examples in each class, and {name} has "
                f"from {min(sizes)} to {max(sizes)}: leave it out."
            )
        self.groups = None if groups is None else self._grouped(groups)
        self._on_device: dict[torch.device, ImagesOnDevice | None] = {}

    def outputs(self, ways: int) -> int:
        """The width of the last layer of a model for tasks of `ways` classes: `ways`."""
        return ways

    def split_classes(self, split: str) -> list[np.ndarray]:
        """A split's images, for training on all its classes at once.

        Returns:
            One uint8 array of shape (examples, *image shape) per base class, without rotations;
            views, which must not be written to.
        """
        return [self.images[index] for index in self.splits[split]]

    def inputs(self, pixels: np.ndarray, split: str, generator: np.random.Generator) -> Tensor:
        """Convert images to model inputs: augmented in training, and normalized.

        Args:
            pixels: uint8 of shape (…, *image shape).
            split: the split of the images.
            generator: the source of randomness of augmentation, which advances it.

        Returns:
            float32 of shape (n, *input_shape), in [0, 1] without normalization.
        """
        images = torch.from_numpy(np.ascontiguousarray(pixels)).reshape(-1, *self.input_shape)
        # PyTorch converts and divides in one pass, faster than NumPy and with equal bits.
        inputs = images / 255
        if split == "train":
            if not self.augment.is_identity:
                inputs = torch.from_numpy(self.augment(inputs.numpy(), generator))
            if self.transforms:
                inputs = apply_transforms(self.transforms, inputs, generator)
        if not self.normalize.is_identity:
            inputs = self.normalize(inputs)
        return inputs

    def check(
        self,
        ways: int,
        shots: int,
        queries: int,
        splits: Sequence[str] = SPLITS,
        key_prefix: str = "task.",
    ) -> None:
        """Raise `UserError` if a split has too few classes, or a class too few examples."""
        needed = shots + queries
        small = [
            index
            for split in splits
            for index in self.splits[split]
            if self.class_sizes[index] < needed
        ]
        if small and self.skip_small_classes:
            _log.info(
                "classes of %s with fewer than %d examples are left out: %s",
                self.name, needed, self._listed(small),
            )  # fmt: skip
        elif small:
            raise UserError(
                f"{key_prefix}shots + {key_prefix}queries is {shots} + {queries} = {needed}, but "
                f"{self._too_small(small)}."
            )
        for split in splits:
            members = self._large_enough(self.splits[split], needed)
            if ways > len(members):
                classes = "class" if len(members) == 1 else "classes"
                enough = f" with {needed} examples" if small else ""
                raise UserError(
                    f"{key_prefix}ways is {ways}, but the {split} split of {self.name} has only "
                    f"{len(members)} {classes}{enough}; lower {key_prefix}ways"
                    f"{self._more_classes(split)}."
                )
            groups = (self.groups or {}).get(split, [])
            largest = max(
                (len(self._large_enough(group, needed)) for group in groups), default=ways
            )
            if ways > largest:
                raise UserError(
                    f"{key_prefix}ways is {ways}, but the largest {self.group} in the {split} "
                    f"split of {self.name} has only {largest} classes; lower {key_prefix}ways or "
                    f"set {self.without_groups}."
                )

    def episode(
        self, generator: np.random.Generator, split: str, ways: int, shots: int, queries: int
    ) -> Episode:
        """Sample a task: random classes, labeled 0 to ways - 1 in order, and random examples.

        Args:
            generator: the only source of randomness; it is advanced.
            split: one of `metadist.tasks.episode.SPLITS`.
            ways: classes in the task, of different base classes.
            shots: support examples per class.
            queries: query examples per class, none of which is in the support set.

        Returns:
            inputs float32, as returned by `inputs`, of shape (ways * shots, *input_shape) and
            (ways * queries, *input_shape), all examples of class 0 first; targets int64 of shape
            (ways * shots,) and (ways * queries,).
        """
        drawn = self._draw(generator, split, ways, shots + queries)
        pixels = np.stack(
            [
                self.images[index][indices]
                for index, indices in zip(drawn.classes, drawn.examples, strict=True)
            ]
        )  # (ways, shots + queries, …)
        for rotation in range(1, ROTATIONS):
            rotated = drawn.rotations == rotation
            if rotated.any():
                pixels[rotated] = np.rot90(pixels[rotated], rotation, axes=(-2, -1))
        support, query = pixels[:, :shots], pixels[:, shots:]
        return Episode(
            Examples(self.inputs(support, split, generator), _targets(ways, shots)),
            Examples(self.inputs(query, split, generator), _targets(ways, queries)),
        )

    def episodes(
        self,
        device: torch.device,
        generators: Iterable[np.random.Generator],
        split: str,
        ways: int,
        shots: int,
        queries: int,
    ) -> Episode | None:
        """Sample one episode per generator on a GPU, from images that stay on it.

        The first call copies all images to the GPU; later calls copy indices only.

        Args:
            device: the device on which the episodes are made.
            generators: one generator per task; each is used before the next one is taken.
            split: see `episode`.
            ways: see `episode`.
            shots: see `episode`.
            queries: see `episode`.

        Returns:
            The episodes of `episode`, stacked along a leading task dimension; None on the CPU, if
            images are augmented, or if the images take more than a quarter of the device's free
            memory.
        """
        if split == "train" and (self.transforms or not self.augment.is_identity):
            return None
        if device not in self._on_device:
            fits = fits_on_device(self.images, device)
            self._on_device[device] = ImagesOnDevice(self.images, device) if fits else None
        images = self._on_device[device]
        if images is None:
            return None
        draws = [self._draw(generator, split, ways, shots + queries) for generator in generators]
        pixels = images.select(
            np.stack([draw.classes for draw in draws]),
            np.array([draw.examples for draw in draws]),
            np.stack([draw.rotations for draw in draws]),
        ).view(len(draws), ways, shots + queries, *self.input_shape)
        parts = []
        # Not 255 as a number, of which GPUs take the reciprocal, with other bits.
        largest = torch.full((), 255.0, device=device)
        for part, count in ((pixels[:, :, :shots], shots), (pixels[:, :, shots:], queries)):
            inputs = part.reshape(-1, *self.input_shape) / largest
            if not self.normalize.is_identity:
                inputs = self.normalize(inputs)
            targets = torch.arange(ways, device=device).repeat_interleave(count)
            inputs = inputs.view(len(draws), ways * count, *self.input_shape)
            parts.append(Examples(inputs, targets.repeat(len(draws), 1)))
        return Episode(*parts)

    def describe(
        self, generator: np.random.Generator, split: str, ways: int, shots: int, queries: int
    ) -> EpisodeDescription:
        """The classes and query images of the task that `episode` samples, without loading images.

        Args:
            generator: a generator in the state before `episode`; it is advanced.
            split: see `episode`.
            ways: see `episode`.
            shots: see `episode`.
            queries: see `episode`.
        """
        drawn = self._draw(generator, split, ways, shots + queries)
        names = []
        for index, rotation in zip(drawn.classes, drawn.rotations, strict=True):
            name = str(index) if self.class_names is None else self.class_names[index]
            angle = f" ({90 * rotation}°)" if rotation else ""
            names.append(f"{name.partition('/')[2] or name}{angle}")
        images = [int(number) for examples in drawn.examples for number in examples[shots:]]
        return EpisodeDescription(names, images)

    def protocol(self) -> dict[str, object]:
        """The dataset's name and checksum, its rotations, and its transforms if any."""
        return {
            "dataset": self.name,
            "data_checksum": self._checksum,
            "rotations": self.rotations,
            "test_rotations": self.test_rotations,
            **({} if self.normalize.is_identity else {"normalize": self.normalize.protocol()}),
            **({} if self.augment.is_identity else {"augment": self.augment.protocol()}),
            **({"transforms": transform_names(self.transforms)} if self.transforms else {}),
        }

    @functools.cached_property
    def _checksum(self) -> str:
        """CRC-32 of the classes' names, sizes, splits and one image each, as hexadecimal digits.

        Reading all images would take seconds.
        """
        splits = [self.splits[split].tolist() for split in SPLITS]
        checksum = zlib.crc32(repr((self.class_names, self.class_sizes.tolist(), splits)).encode())
        for index, class_images in enumerate(self.images):
            example = index % max(1, len(class_images))
            checksum = zlib.crc32(class_images[example : example + 1].tobytes(), checksum)
        return f"{checksum:08x}"

    def _draw(self, generator: np.random.Generator, split: str, ways: int, needed: int) -> _Draw:
        """Draw the classes of a task, `needed` examples of each, and the rotations.

        Raises:
            UserError: there is no such split, or it has too few classes or examples.
        """
        if split not in self.splits:
            raise UserError(f"there is no split {split!r}: choose one of {', '.join(SPLITS)}.")
        members = self._candidates(generator, split, ways, needed)
        if ways > len(members):
            self.check(ways, needed, 0, [split])
        classes = members[generator.choice(len(members), ways, replace=False)]
        examples = [generator.permutation(self.class_sizes[index])[:needed] for index in classes]
        if small := [index for index in classes.tolist() if self.class_sizes[index] < needed]:
            raise UserError(
                f"a task has {needed} examples of each class, but {self._too_small(small)}."
            )
        if self.test_drawers and split != "train":
            examples = examples[:1] * ways
        rotations = np.zeros(ways, np.int64)
        if self.rotations if split == "train" else self.test_rotations:
            rotations = generator.integers(ROTATIONS, size=ways)
        return _Draw(classes, examples, rotations)

    def _more_classes(self, split: str) -> str:
        """What continues an error message: how a split gets more classes."""
        return " or use a dataset with more classes"

    def _too_small(self, small: Sequence[int]) -> str:
        """The end of an error message about classes with too few examples."""
        if len(small) > 1 and len(sizes := set(self.class_sizes)) == 1:
            examples = counted(sizes.pop(), "example")
            return f"a class of {self.name} has only {examples}; lower one of them"
        return (
            f"some classes of {self.name} have fewer examples: {self._listed(small)}; "
            f"lower one of them, add images, or {self.without_small_classes}"
        )

    def _listed(self, classes: Sequence[int]) -> str:
        """The names of classes, with their numbers of examples."""
        names = [
            f"{self.class_names[index] if self.class_names else index} ({self.class_sizes[index]})"
            for index in classes[:_MAX_NAMED]
        ]
        omitted = len(classes) - len(names)
        return ", ".join(names) + (f" and {omitted} more" if omitted else "")

    def _large_enough(self, classes: np.ndarray, needed: int) -> np.ndarray:
        """The classes with at least `needed` examples if small classes are left out, else all."""
        return classes[self.class_sizes[classes] >= needed] if self.skip_small_classes else classes

    def _candidates(
        self, generator: np.random.Generator, split: str, ways: int, needed: int
    ) -> np.ndarray:
        """The base classes from which a task of a split samples its classes."""
        if self.groups is None:
            return self._large_enough(self.splits[split], needed)
        groups = (self._large_enough(group, needed) for group in self.groups[split])
        large = [group for group in groups if len(group) >= ways]
        if not large:
            self.check(ways, needed, 0, [split])
        return large[generator.integers(len(large))]

    def _grouped(self, groups: Sequence[str]) -> dict[str, list[np.ndarray]]:
        """For each split the classes of each group, in the order of the groups' names."""
        grouped = {}
        for split, members in self.splits.items():
            group_members: dict[str, list[int]] = {}
            for index in members.tolist():
                group_members.setdefault(groups[index], []).append(index)
            grouped[split] = [np.array(group_members[name]) for name in sorted(group_members)]
        return grouped


def split_indices(splits: Sequence[str]) -> dict[str, np.ndarray]:
    """The indices of each split's classes, given the split of each class."""
    class_splits = np.array(splits)
    return {split: np.flatnonzero(class_splits == split) for split in SPLITS}


def _targets(ways: int, count: int) -> Tensor:
    # For so few numbers NumPy is several times as fast as PyTorch.
    return torch.from_numpy(np.repeat(np.arange(ways), count))


def _checked_shape(name: str, images: Iterable[np.ndarray], rotated: bool) -> tuple[int, ...]:
    """The shape of a dataset's images, (channels, height, width), after checking them."""
    kinds = {(class_images.dtype, class_images.shape[1:]) for class_images in images}
    dtype, shape = kinds.pop() if kinds else (None, ())
    if kinds or dtype != np.uint8 or len(shape) not in (2, 3):
        raise ValueError(
            f"images must be uint8 of shape (classes, examples, [channels,] height, width), "
            f"got {dtype} and (classes, examples, {', '.join(map(str, shape))})"
        )
    if len(shape) == 3 and shape[-1] in (1, 3, 4) and shape[0] not in (1, 3, 4):
        raise UserError(
            f"images of {name} have {shape[0]} channels of {shape[1]} x {shape[2]} pixels, as "
            "if the channels came last: move them before height and width, as by "
            "numpy.moveaxis(images, -1, -3)."
        )
    if rotated and shape[-1] != shape[-2]:
        raise ValueError(f"only square images can be rotated, got {shape[-2:]}")
    return shape if len(shape) == 3 else (1, *shape)


def _checked_splits(
    name: str, splits: Mapping[str, np.ndarray], classes: int
) -> dict[str, np.ndarray]:
    """The class indices of each split as int64, after checking that no class is repeated."""
    if missing := [split for split in SPLITS if split not in splits]:
        raise UserError(
            f"the splits of {name} are {', '.join(splits)}, and {missing[0]} is missing: give "
            f"{', '.join(SPLITS)}."
        )
    checked = {}
    for split in SPLITS:
        members = np.asarray(splits[split])
        integers = not members.size or np.issubdtype(members.dtype, np.integer)
        if not integers or members.ndim != 1:
            raise UserError(
                f"the split {split} of {name} has values of type {members.dtype} and shape "
                f"{members.shape}: give a list of the indices of its classes, as by "
                "numpy.flatnonzero of a mask."
            )
        members = checked[split] = members.astype(np.int64)
        if outside := sorted({*members.tolist()} - {*range(classes)}):
            raise UserError(
                f"the split {split} of {name} has the class {outside[0]}, and its {classes} "
                f"classes are 0 to {classes - 1}."
            )
        if len(np.unique(members)) < len(members):
            raise UserError(f"the split {split} of {name} has a class twice: give each once.")
    for first, second in itertools.combinations(SPLITS, 2):
        if len(shared := np.intersect1d(checked[first], checked[second])):
            raise UserError(
                f"class {shared[0]} of {name} is in {first} and in {second}: put each class "
                "into one split, since test classes must not be trained."
            )
    return checked
