"""tieredImageNet: 608 classes of ImageNet, divided by their categories, 84 by 84 pixels."""

import functools
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from metadist.errors import UserError
from metadist.tasks import array_cache, data_files, image_files, restricted_pickle
from metadist.tasks.array_cache import ArraySpec, CachedArray
from metadist.tasks.data_files import error_with_type
from metadist.tasks.image_folder import group_by_class, load_classes, split_classes
from metadist.tasks.images import ImageClasses
from metadist.tasks.restricted_pickle import to_integers, to_text
from metadist.tasks.transforms import Augment, ImageTransform, Normalize

CLASSES = {"train": 351, "validation": 97, "test": 160}
"""Number of classes of each split in Ren et al."""

SIDE = 84
"""Height and width in pixels."""

_SHORT_NAMES = {"train": "train", "validation": "val", "test": "test"}
_FORMAT = 1
"""Part of the fingerprint; raise it when the same files are decoded to another array."""


class TieredImageNet(ImageClasses):
    """tieredImageNet (Ren et al. 2018, arXiv 1803.00676): 351, 97 and 160 classes.

    The classes of a split are those of 20, 6 and 8 categories, so that test classes are less
    similar to training classes than in MiniImageNet. A class has 732 to 1300 images. One process
    decodes the images once, into a file of 16.5 GB that every process maps.

    Attributes:
        input_shape: (3, 84, 84).
        regression: False.
    """

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
            root: directory with `train_images_png.pkl`, `train_labels.pkl` and the same of `val`
                and `test`, as published by the authors, possibly in `tiered-imagenet`; or with
                folders `train`, `val` and `test` with a folder of images for each class. It need
                not be writable: the images are then cached in `$METADIST_CACHE`,
                `$XDG_CACHE_HOME/metadist` or `~/.cache/metadist`.
            rotations: whether sampled training classes are rotated by multiples of 90°.
            test_rotations: the same for validation and test.
            normalize: normalization of every image; None for none.
            augment: augmentation of training images, before normalization; None for none.
            transforms: further ones, after `augment`; see `apply_transforms`.

        Raises:
            UserError: the files are missing, incomplete or damaged, or have more than images.
        """
        array, names = load_images(Path(root).expanduser())
        images, class_names = group_by_class(array, names)
        splits = split_classes(class_names, 0, 0.2, 0.2, root)
        for split, expected in CLASSES.items():
            if len(splits[split]) != expected:
                raise UserError(
                    f"the number of classes for {split} in {root} is {len(splits[split])}, in "
                    f"tieredImageNet {expected}; replace it with a complete copy, or use "
                    "dataset=folder"
                )
        super().__init__(
            "tiered_imagenet",
            images,
            splits,
            rotations,
            test_rotations,
            normalize=normalize,
            augment=augment,
            transforms=transforms,
            class_names=class_names,
        )

    def protocol(self) -> dict[str, object]:
        """Name of the dataset, its split, rotations, image size, and transforms if any."""
        return {
            **super().protocol(),
            "class_split": "ren",
            "classes": {split: len(members) for split, members in self.splits.items()},
            "image_size": self.input_shape[-1],
        }


def load_images(root: Path) -> CachedArray:
    """The decoded images: cached, or from one of the layouts; see `TieredImageNet`."""
    stem = "tiered_imagenet"
    with data_files.root_errors(root, "tieredImageNet"):
        for folder in (root, root / "tiered-imagenet"):
            pickles = {
                split: (folder / f"{short}_images_png.pkl", folder / f"{short}_labels.pkl")
                for split, short in _SHORT_NAMES.items()
            }
            files = [file for pair in pickles.values() for file in pair]
            if all(file.is_file() for file in files):
                digest = data_files.fingerprint(((file.name, file) for file in files), _FORMAT)
                name = f"{stem}_{digest}.npy"
                return array_cache.load_or_create(root, name, functools.partial(_decode, pickles))
        if all((root / short).is_dir() for short in _SHORT_NAMES.values()):
            classes = image_files.find_classes(root, "tieredImageNet")
            image_files.check_disjoint(((each.split, each.name) for each in classes), root)
            return load_classes(root, stem, [each for each in classes if each.files], SIDE, "RGB")
    if (found := array_cache.load_any(root, stem)) is not None:
        return found
    raise UserError(
        f"{root} has neither train_images_png.pkl and train_labels.pkl of tieredImageNet, with "
        "those of val and test, nor folders train, val and test of class folders: run metadist "
        "fetch tiered_imagenet, or set dataset.root to the directory that has them"
    )


def _decode(pickles: dict[str, tuple[Path, Path]]) -> ArraySpec:
    """Decode the PNG images of the authors' files, class by class."""
    names: list[str] = []
    encoded: list[tuple[np.ndarray, Path]] = []
    for split, (images_file, labels_file) in pickles.items():
        images = restricted_pickle.load_arrays(images_file)
        for name, indices in _classes(labels_file, len(images)).items():
            names += [f"{split}/{name}/{index}" for index in indices.tolist()]
            encoded += [(images[index], images_file) for index in indices.tolist()]

    def rows() -> Iterator[np.ndarray]:
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            for start in range(0, len(encoded), image_files.CHUNK):
                yield from pool.map(_decode_png, encoded[start : start + image_files.CHUNK])

    return ArraySpec((3, SIDE, SIDE), names, rows())


def _decode_png(given: tuple[np.ndarray, Path]) -> np.ndarray:
    array, file = given
    try:
        data = array.tobytes()
        return data_files.decode_image(
            data, "RGB", SIDE, ("PNG",), image_files.MAX_IMAGE_PIXELS
        ).transpose(2, 0, 1)
    except ValueError as error:
        raise UserError(
            f"an image of {file} cannot be decoded as PNG ({error}); replace it with a complete "
            "copy"
        ) from error


def _classes(file: Path, images: int) -> dict[str, np.ndarray]:
    """The indices of each class's images, by the class's name."""
    contents = restricted_pickle.load_file(file)
    try:
        labels = to_integers(contents["label_specific"], images)
        known = [to_text(name) for name in contents["label_specific_str"]]
        if len(labels) != images or not 0 <= labels.min() <= labels.max() < len(known):
            raise ValueError(f"{len(labels)} labels of {len(known)} classes for {images} images")
        if len(set(known)) != len(known) or any("/" in name for name in known):
            raise ValueError("the names of its classes are not unique, or have slashes")
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise UserError(
            f"{file} has no labels of tieredImageNet ({error_with_type(error)}): it needs "
            "label_specific and label_specific_str; replace it with a complete copy"
        ) from error
    order = np.argsort(labels, kind="stable")
    parts = np.split(order, np.searchsorted(labels[order], np.arange(1, len(known))))
    return {name: part for name, part in zip(known, parts, strict=True) if len(part)}
