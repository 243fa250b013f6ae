"""Few-shot episodes from classes of images that are in memory or mapped."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from metadist.errors import UserError
from metadist.tasks.episode import SPLITS, Episode, Examples
from metadist.tasks.transforms import Augment, Normalize

ROTATIONS = 4
"""Rotations by 0, 90, 180 and 270 degrees."""


class ImageClasses:
    """Images by class, divided into splits; the base class of every image dataset.

    With rotations a class is a base class rotated by 0, 90, 180 or 270 degrees: each rotation is a
    class of its own (Santoro et al. 2016, arXiv 1605.06065). As in the code of MAML (Finn et al.
    2017, arXiv 1703.03400) the classes of a task come from different base classes, each with a
    random rotation, since rotations of a symmetric character may be equal. Only sampled images are
    rotated.

    Attributes:
        input_shape: (1, height, width) for images in one colour, else (channels, height, width).
        regression: False.
    """

    regression = False

    def __init__(
        self,
        name: str,
        images: np.ndarray,
        splits: Mapping[str, np.ndarray],
        rotations: bool = False,
        test_rotations: bool = False,
        groups: Sequence[str] | None = None,
        normalize: Normalize | None = None,
        augment: Augment | None = None,
    ) -> None:
        """Take images, without copying them.

        Args:
            name: the dataset's name in `protocol`.
            images: uint8 of shape (classes, examples, height, width) or (classes, examples,
                channels, height, width). May be a memory map and is never written to.
            splits: for each of `metadist.tasks.episode.SPLITS` the indices of its base classes
                in `images`, int64 of shape (classes of the split,).
            rotations: whether rotated training classes are classes of their own.
            test_rotations: the same for validation and test.
            groups: the group of each base class, such as its alphabet; all classes of a task
                then come from one group, sampled uniformly among those that are large enough. None
                for tasks across groups.
            normalize: normalization of every image; None for none.
            augment: augmentation of training images, before normalization; None for none.

        Raises:
            UserError: `normalize` does not fit the channels.
            ValueError: `images` has another type or shape, or is to be rotated but not square.
        """
        if images.dtype != np.uint8 or images.ndim not in (4, 5):
            raise ValueError(
                f"images must be uint8 of shape (classes, examples, [channels,] height, width), "
                f"got {images.dtype} of shape {images.shape}"
            )
        if (rotations or test_rotations) and images.shape[-1] != images.shape[-2]:
            raise ValueError(f"only square images can be rotated, got {images.shape[-2:]}")
        self.name = name
        # A plain view: indexing np.memmap itself is slower and yields np.memmap again.
        self.images = np.asarray(images)
        self.splits = {split: np.asarray(splits[split], dtype=np.int64) for split in SPLITS}
        self.rotations = rotations
        self.test_rotations = test_rotations
        self.input_shape: tuple[int, ...] = (
            (1, *images.shape[2:]) if images.ndim == 4 else tuple(images.shape[2:])
        )
        self.normalize = normalize or Normalize()
        self.normalize.check(self.input_shape[0])
        self.augment = augment or Augment()
        self.groups = None if groups is None else self._grouped(groups)

    def outputs(self, ways: int) -> int:
        """Width of the last layer of a model for tasks of `ways` classes: `ways`."""
        return ways

    def split_classes(self, split: str) -> np.ndarray:
        """A split's images, for training on all its classes at once.

        Returns:
            uint8 of shape (base classes, examples, *image shape), without rotations, not to be
            written to: a view where the split's classes are contiguous, else a copy.
        """
        members = self.splits[split]
        first = members[0] if len(members) else 0
        if np.array_equal(members, np.arange(first, first + len(members))):
            return self.images[first : first + len(members)]
        return self.images[members]

    def inputs(self, pixels: np.ndarray, split: str, generator: np.random.Generator) -> Tensor:
        """Model inputs of images: augmented in training, and normalized.

        Args:
            pixels: uint8 of shape (…, *image shape).
            split: the split of the images.
            generator: advanced by augmentation.

        Returns:
            float32 of shape (n, *input_shape), in [0, 1] without normalization.
        """
        whole = torch.from_numpy(np.ascontiguousarray(pixels)).reshape(-1, *self.input_shape)
        # PyTorch converts and divides in one pass, faster than NumPy and with equal bits.
        inputs = whole / 255
        if split == "train" and not self.augment.is_identity:
            inputs = torch.from_numpy(self.augment(inputs.numpy(), generator))
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
        for split in splits:
            members = self.splits[split]
            if ways > len(members):
                raise UserError(
                    f"{key_prefix}ways is {ways}, but the {split} split of {self.name} has only "
                    f"{len(members)} classes; lower {key_prefix}ways or use a dataset with more "
                    "classes"
                )
            if self.groups and ways > (largest := max(map(len, self.groups[split]))):
                raise UserError(
                    f"{key_prefix}ways is {ways}, but the largest alphabet in the {split} split of "
                    f"{self.name} has only {largest} characters; lower {key_prefix}ways or set "
                    "dataset.within_alphabet=false"
                )
        examples = self.images.shape[1]
        if shots + queries > examples:
            raise UserError(
                f"{key_prefix}shots + {key_prefix}queries is {shots} + {queries} = "
                f"{shots + queries}, but a class of {self.name} has only {examples} examples; "
                "lower one of them"
            )

    def episode(
        self, generator: np.random.Generator, split: str, ways: int, shots: int, queries: int
    ) -> Episode:
        """Sample a task: random classes, labelled 0 to ways - 1 in order, and random examples.

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
        members = self._candidates(generator, split, ways)
        classes = members[generator.choice(len(members), ways, replace=False)]
        order = np.arange(self.images.shape[1])[None].repeat(ways, axis=0)
        examples = generator.permuted(order, axis=1)[:, : shots + queries]
        pixels = self.images[classes[:, None], examples]  # (ways, shots + queries, …)
        if self.rotations if split == "train" else self.test_rotations:
            rotations = generator.integers(ROTATIONS, size=ways)
            for rotation in range(1, ROTATIONS):
                rotated = rotations == rotation
                pixels[rotated] = np.rot90(pixels[rotated], rotation, axes=(-2, -1))
        support, query = pixels[:, :shots], pixels[:, shots:]
        return Episode(
            Examples(self.inputs(support, split, generator), _targets(ways, shots)),
            Examples(self.inputs(query, split, generator), _targets(ways, queries)),
        )

    def protocol(self) -> dict[str, object]:
        """Name of the dataset, whether rotations are classes, and transforms if any."""
        transforms: dict[str, Normalize | Augment] = {
            "normalize": self.normalize,
            "augment": self.augment,
        }
        return {
            "dataset": self.name,
            "rotations": self.rotations,
            "test_rotations": self.test_rotations,
            **{name: t.protocol() for name, t in transforms.items() if not t.is_identity},
        }

    def _candidates(self, generator: np.random.Generator, split: str, ways: int) -> np.ndarray:
        """The base classes that a task of a split is sampled from."""
        if self.groups is None:
            return self.splits[split]
        large = [group for group in self.groups[split] if len(group) >= ways]
        return large[generator.integers(len(large))]

    def _grouped(self, groups: Sequence[str]) -> dict[str, list[np.ndarray]]:
        """For each split the classes of each group, in the order of the groups' names."""
        found = {}
        for split, members in self.splits.items():
            of_group: dict[str, list[int]] = {}
            for index in members.tolist():
                of_group.setdefault(groups[index], []).append(index)
            found[split] = [np.array(of_group[name]) for name in sorted(of_group)]
        return found


def _targets(ways: int, count: int) -> Tensor:
    # NumPy creates so few numbers in a fraction of the time that PyTorch takes.
    return torch.from_numpy(np.repeat(np.arange(ways), count))
