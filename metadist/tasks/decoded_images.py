"""Datasets of image files: decoded once, into an array that every process maps."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np

from metadist.errors import UserError
from metadist.tasks import array_cache, data_files, image_files
from metadist.tasks.array_cache import ArraySpec
from metadist.tasks.image_files import ImageClass
from metadist.tasks.images import ImageClasses, split_indices
from metadist.tasks.transforms import Augment, ImageTransform, Normalize

_FORMAT = 3
"""Part of the fingerprint; raise it when the same files are decoded to another array."""


class Source(NamedTuple):
    """The files of a dataset, and how they are decoded.

    Attributes:
        stem: the stem of the cached file's name.
        files: pairs of a file's name and its path; see `metadist.tasks.data_files.fingerprint`.
        options: the other values that the decoded images depend on, such as their size.
        decode: a function that returns the images, one row each, named `CLASS/FILE` and sorted by
            class, where CLASS may have slashes. The names are known before an image is decoded.
        origins: the file or folder of each key of `DecodedImages.expected`, for messages; by
            default the dataset's directory.
    """

    stem: str
    files: Sequence[tuple[str, Path]]
    options: tuple[object, ...]
    decode: Callable[[], ArraySpec]
    origins: Mapping[str, Path] = {}

    @property
    def cache_name(self) -> str:
        """The name of the cached file."""
        digest = data_files.fingerprint(self.files, _FORMAT, *self.options)
        return f"{self.stem}_{digest}.npy"


class Counts(NamedTuple):
    """The classes and images of a complete copy of a dataset.

    Attributes:
        classes: the number of classes.
        examples: the number of images of each class; None if it differs.
        images: the least number of images of all classes together.
    """

    classes: int
    examples: int | None = None
    images: int = 0


class DecodedImages(ImageClasses, ABC):
    """Base class of datasets in a directory of image files, archives or pickles.

    One process decodes the images once, into a file that every process maps, in the directory of
    `metadist.tasks.array_cache.cache_directory`; `root` need not be writable.

    Attributes:
        dataset_name: the dataset's name in `protocol`.
        title: the dataset's name in messages.
        class_split: the split's name in `protocol`.
        expected: the size of a complete copy, by the part of the classes' names before the first
            slash; the key "" stands for all classes. By default any size is complete.
        layout: the form of the files' names, for messages.
        classes: for each split the names of its classes.
    """

    dataset_name: ClassVar[str]
    title: ClassVar[str]
    class_split: ClassVar[str]
    expected: ClassVar[Mapping[str, Counts]] = {}
    layout: ClassVar[str] = ""
    classes: Mapping[str, Sequence[str]]
    class_names: list[str]

    def __init__(
        self,
        root: str,
        rotations: bool = False,
        test_rotations: bool = False,
        normalize: Normalize | None = None,
        augment: Augment | None = None,
        transforms: Sequence[ImageTransform] = (),
    ) -> None:
        """Find the images in `root`.

        Args:
            root: the dataset's directory.
            rotations: whether sampled training classes are rotated by multiples of 90°.
            test_rotations: the same for validation and test.
            normalize: normalization of every image; None for none.
            augment: augmentation of training images, before normalization; None for none.
            transforms: further transforms, after `augment`; see `apply_transforms`.

        Raises:
            UserError: the files are missing, incomplete or damaged, or pickles have anything but
                images. The message names the file.
        """
        directory = Path(root).expanduser()
        images, names = self._load(directory)
        splits = self._split(names, directory)
        super().__init__(
            self.dataset_name,
            images,
            splits,
            rotations,
            test_rotations,
            normalize=normalize,
            augment=augment,
            transforms=transforms,
            class_names=names,
        )
        self.classes = {
            split: [names[index].rpartition("/")[2] for index in members]
            for split, members in splits.items()
        }

    @abstractmethod
    def _find(self, root: Path) -> Source:
        """The dataset's files in `root`.

        Raises:
            UserError: there are none.
            OSError: a folder cannot be read.
        """

    def _load(self, root: Path) -> tuple[list[np.ndarray], list[str]]:
        """The images of each class, as views of the mapped file, and the classes' names.

        A name is `CLASS` or, if the files say the split, `SPLIT/CLASS`.
        """
        with data_files.root_errors(root, self.title):
            source = self._find(root)

        def create() -> ArraySpec:
            spec = source.decode()
            sizes = _class_sizes(spec.names)
            # Errors in the classes are raised before images are decoded.
            self._check_complete(sizes, source, root)
            self._split(list(sizes), root)
            return spec

        cached = array_cache.load_or_create(root, source.cache_name, create)
        sizes = _class_sizes(cached.names)
        return np.split(np.asarray(cached.array), np.cumsum([*sizes.values()])[:-1]), list(sizes)

    def _check_complete(self, sizes: Mapping[str, int], source: Source, root: Path) -> None:
        """Raise `UserError` if classes or images are missing, given the size of each class."""
        for part, expected in self.expected.items():
            members = {n: size for n, size in sizes.items() if not part or n.startswith(f"{part}/")}
            origin, of_part = source.origins.get(part, root), f" for {part}" if part else ""
            if len(members) != expected.classes:
                raise UserError(
                    f"the number of classes{of_part} in {origin} is {len(members)}, in {self.title}"
                    f" {expected.classes}{self.layout}; replace it with a complete copy."
                )
            for name, size in members.items():
                if size != (expected.examples or size):
                    raise UserError(
                        f"the class {name} in {origin} has {size} images where {self.title} has "
                        f"{expected.examples}; replace it with a complete copy."
                    )
            if (images := sum(members.values())) < expected.images:
                raise UserError(
                    f"the number of images{of_part} in {origin} is {images}, in {self.title} "
                    f"{expected.images}; replace it with a complete copy, or use dataset=folder."
                )

    def _split(self, names: Sequence[str], root: Path) -> dict[str, np.ndarray]:
        """The indices of each split's classes in `names`; by default from names `SPLIT/CLASS`.

        Raises:
            UserError: two splits share a class.
        """
        split_of: dict[str, str] = {}
        for split, _, name in (name.partition("/") for name in names):
            if (first_split := split_of.setdefault(name, split)) != split:
                raise UserError(
                    f"the class {name} of {root} is in {first_split} and in {split}, where a class "
                    "of few-shot learning belongs to one split; use the files of the published "
                    "split, or for your own data with dataset=folder put each class into one "
                    "split, or give a directory of class folders without splits."
                )
        return split_indices([name.partition("/")[0] for name in names])

    def _split_protocol(self) -> dict[str, object]:
        """The part of the protocol that identifies the split."""
        return {"class_split": self.class_split}

    def protocol(self) -> dict[str, object]:
        """The dataset's name, its split, rotations, image size, and transforms if any."""
        return {
            **super().protocol(),
            **self._split_protocol(),
            "classes": {split: len(members) for split, members in self.splits.items()},
            "image_size": self.input_shape[-1],
        }


def image_source(stem: str, classes: Sequence[ImageClass], size: int, mode: str = "RGB") -> Source:
    """The source of images in files of their own.

    Args:
        stem: the stem of the cached file's name.
        classes: the classes; those without files are left out.
        size: height and width, in pixels.
        mode: "RGB"; or "L" for greyscale images, which have no channel dimension.
    """
    files = [file for each in classes for file in each.files]
    names = [f"{each.full_name}/{file.name}" for each in classes for file in each.files]
    shape = (3, size, size) if mode == "RGB" else (size, size)

    def decode() -> ArraySpec:
        return ArraySpec(shape, names, image_files.decode_files(files, mode, size))

    return Source(stem, [*zip(names, files, strict=True)], (size, mode), decode)


def _class_sizes(names: Sequence[str]) -> Counter[str]:
    """The number of rows of each class, in order, given the rows' names `CLASS/FILE`."""
    return Counter(name.rpartition("/")[0] for name in names)
