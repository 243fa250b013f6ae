"""Datasets of image files: decoded once, into an array that every process maps."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from metadist.tasks import array_cache, data_files, image_files
from metadist.tasks.array_cache import ArraySpec, CachedArray
from metadist.tasks.image_files import ImageClass
from metadist.tasks.images import ImageClasses, split_indices
from metadist.tasks.transforms import Augment, ImageTransform, Normalize

_FORMAT = 2
"""Part of the fingerprint; raise it when the same files are decoded to another array."""


class DecodedImages(ImageClasses, ABC):
    """Base class of datasets in a directory of image files, archives or pickles.

    One process decodes the images once, into a file that every process maps. `root` need not be
    writable: the images are then cached in `$METADIST_CACHE`, `$XDG_CACHE_HOME/metadist` or
    `~/.cache/metadist`.

    Attributes:
        dataset_name: the dataset's name in `protocol`.
        class_split: the split's name in `protocol`.
        classes: for each split the names of its classes.
    """

    dataset_name: ClassVar[str]
    class_split: ClassVar[str]
    classes: Mapping[str, Sequence[str]]

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
            class_names=[name.lstrip("/") for name in names],
        )
        self.classes = {
            split: [names[index].rpartition("/")[2] for index in members]
            for split, members in splits.items()
        }

    @abstractmethod
    def _load(self, root: Path) -> tuple[np.ndarray | Sequence[np.ndarray], list[str]]:
        """The images by class, as `ImageClasses` takes them, and the classes' names.

        A name is `CLASS` or `SPLIT/CLASS`, where SPLIT may be empty.
        """

    def _split(self, names: Sequence[str], root: Path) -> dict[str, np.ndarray]:
        """The indices of each split's classes in `names`; by default from `SPLIT` in the names."""
        return given_splits(names)

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


def load_classes(
    root: Path, stem: str, classes: Sequence[ImageClass], size: int, mode: str
) -> tuple[list[np.ndarray], list[str]]:
    """The decoded images of each class, from the cache if possible; see `group_by_class`.

    Args:
        root: the directory that has the files.
        stem: the stem of the cached file's name.
        classes: the classes, each with at least one file.
        size: height and width, in pixels.
        mode: "RGB"; or "L" for greyscale images, which have no channel dimension.

    Raises:
        UserError: a file cannot be read or decoded.
    """
    files = [file for image_class in classes for file in image_class.files]
    names = [
        f"{image_class.split}/{image_class.name}/{file.name}"
        for image_class in classes
        for file in image_class.files
    ]
    # Two lists may name the same files in the same order for different classes.
    rows = (
        f"{name} {file.relative_to(root).as_posix()}"
        for name, file in zip(names, files, strict=True)
    )
    digest = data_files.fingerprint([*zip(rows, files, strict=True)], _FORMAT, size, mode)
    shape = (3, size, size) if mode == "RGB" else (size, size)

    def decode() -> ArraySpec:
        return ArraySpec(shape, names, image_files.decode_files(files, mode, size))

    return group_by_class(array_cache.load_or_create(root, f"{stem}_{digest}.npy", decode))


def group_by_class(cached: CachedArray) -> tuple[list[np.ndarray], list[str]]:
    """The images of each class, as views, and the classes' names `SPLIT/CLASS`.

    Args:
        cached: an array with one row per image, named `SPLIT/CLASS/FILE` and sorted by class.
    """
    class_names = ["/".join(name.split("/", 2)[:2]) for name in cached.names]
    sizes = {name: len(list(images)) for name, images in itertools.groupby(class_names)}
    bounds = np.cumsum(list(sizes.values()))[:-1]
    return np.split(np.asarray(cached.array), bounds), list(sizes)


def given_splits(names: Sequence[str]) -> dict[str, np.ndarray]:
    """The indices of each split's names, of the form `SPLIT/CLASS`."""
    return split_indices([name.partition("/")[0] for name in names])
