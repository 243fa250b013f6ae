"""tieredImageNet: 608 classes of ImageNet, divided by their categories, 84 by 84 pixels."""

import functools
from pathlib import Path
from typing import ClassVar

import numpy as np

from metadist.errors import UserError
from metadist.tasks import data_files, image_files, restricted_pickle
from metadist.tasks.array_cache import ArraySpec
from metadist.tasks.data_files import error_with_type
from metadist.tasks.decoded_images import Counts, DecodedImages, Source, image_source
from metadist.tasks.image_files import SHORT_NAMES
from metadist.tasks.restricted_pickle import CONTENT_ERRORS, to_integers, to_text

SIDE = 84
"""Height and width in pixels."""


class TieredImageNet(DecodedImages):
    """tieredImageNet (Ren et al. 2018, arXiv 1803.00676): 351, 97 and 160 classes.

    The splits have the classes of 20, 6 and 8 categories, so that test classes are less
    similar to training classes than in MiniImageNet. A class has 732 to 1300 images.

    `root` has `train_images_png.pkl`, `train_labels.pkl` and the same of `val` and `test`, as
    published by the authors, possibly in `tiered-imagenet`; or folders `train`, `val` and `test`
    with a folder of images for each class. Images are decoded into a file of 16.5 GB.

    See `DecodedImages` for the arguments.

    Attributes:
        input_shape: (3, 84, 84).
        regression: False.
        classes: for each split the names of its classes.
    """

    dataset_name = "tiered_imagenet"
    title = "tieredImageNet"
    class_split = "ren"
    expected: ClassVar = {
        "train": Counts(351, images=448_695),
        "validation": Counts(97, images=124_261),
        "test": Counts(160, images=206_209),
    }

    def _find(self, root: Path) -> Source:
        for folder in (root, root / "tiered-imagenet"):
            pickles = {
                split: (folder / f"{short}_images_png.pkl", folder / f"{short}_labels.pkl")
                for split, short in SHORT_NAMES.items()
            }
            files = [(file.name, file) for pair in pickles.values() for file in pair]
            if all(file.is_file() for _, file in files):
                return Source(self.dataset_name, files, (), functools.partial(_decode, pickles))
        if classes := image_files.find_classes_of_splits(root):
            return image_source(self.dataset_name, classes, SIDE)
        raise UserError(
            f"{root} has neither train_images_png.pkl and train_labels.pkl of tieredImageNet, with "
            "those of val and test, nor folders train, val and test of class folders: run metadist "
            "fetch tiered_imagenet, or set dataset.root to the directory that has them."
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
    rows = image_files.map_in_threads(_decode_png, encoded)
    return ArraySpec((3, SIDE, SIDE), names, rows)


def _decode_png(encoded: tuple[np.ndarray, Path]) -> np.ndarray:
    array, file = encoded
    try:
        data = array.tobytes()
        return data_files.decode_image(
            data, "RGB", SIDE, ("PNG",), image_files.MAX_IMAGE_PIXELS
        ).transpose(2, 0, 1)
    except ValueError as error:
        raise UserError(
            f"an image of {file} cannot be decoded as PNG ({error}); replace it with a complete "
            "copy."
        ) from error


def _classes(file: Path, images: int) -> dict[str, np.ndarray]:
    """The indices of each class's images, by the class's name."""
    contents = restricted_pickle.load_file(file)
    try:
        labels = to_integers(contents["label_specific"], images)
        names = [to_text(name) for name in contents["label_specific_str"]]
        if len(labels) != images or not 0 <= labels.min() <= labels.max() < len(names):
            raise ValueError(f"{len(labels)} labels of {len(names)} classes for {images} images")
        if len(set(names)) != len(names) or any("/" in name for name in names):
            raise ValueError("the names of its classes are not unique, or have slashes")
    except CONTENT_ERRORS as error:
        raise UserError(
            f"{file} has no labels of tieredImageNet ({error_with_type(error)}): it needs "
            "label_specific and label_specific_str; replace it with a complete copy."
        ) from error
    order = np.argsort(labels, kind="stable")
    parts = np.split(order, np.searchsorted(labels[order], np.arange(1, len(names))))
    return {name: part for name, part in zip(names, parts, strict=True) if len(part)}
