"""Find and read the pickles of MiniImageNet."""

from pathlib import Path
from typing import Any

import numpy as np

from metadist.errors import UserError
from metadist.tasks import restricted_pickle
from metadist.tasks.array_cache import ArraySpec
from metadist.tasks.data_files import error_with_type
from metadist.tasks.image_files import SHORT_NAMES
from metadist.tasks.restricted_pickle import CONTENT_ERRORS, to_images, to_integers, to_text

SIDE = 84
"""Height and width in pixels."""

_PICKLES = (
    {split: f"mini-imagenet-cache-{short}.pkl" for split, short in SHORT_NAMES.items()},
    {split: f"mini-imagenet-cache-{split}.pkl" for split in SHORT_NAMES},  # learn2learn's
    {
        "train": "miniImageNet_category_split_train_phase_train.pickle",
        "validation": "miniImageNet_category_split_val.pickle",
        "test": "miniImageNet_category_split_test.pickle",
    },
)


def find(root: Path) -> dict[str, Path]:
    """The pickle of each split in `root`.

    Raises:
        UserError: there are no complete ones. The message names all layouts of MiniImageNet.
    """
    for names in _PICKLES:
        files = {split: root / name for split, name in names.items()}
        if all(path.is_file() for path in files.values()):
            return files
    present = sorted(path.name for path in root.iterdir())[:5] if root.is_dir() else []
    raise UserError(
        f"{root} has none of the layouts of MiniImageNet (it has "
        f"{', '.join(present) or 'nothing'}): put there the folders train, val and test with a "
        "folder of images for each class, or images/ with train.csv, val.csv and test.csv, or "
        f"{', '.join(_PICKLES[0].values())}, or {', '.join(_PICKLES[2].values())}; or run "
        "metadist fetch mini_imagenet."
    )


def decode(files: dict[str, Path]) -> ArraySpec:
    """All images in the pickles of the splits, as views of the mapped files.

    A pickle has `image_data`, uint8 of shape (n, 84, 84, 3), and `class_dict`, the indices of each
    class's images (Ren et al. 2018, arXiv 1803.00676); or `data` of that shape, the images'
    `labels`, and `catname2label` (Gidaris and Komodakis 2018, arXiv 1804.09458).

    Returns:
        uint8 of shape (images, 3, 84, 84), sorted by split and class, with names such as
        `train/n01532829/0`.

    Raises:
        UserError: a file cannot be read or has other contents.
    """
    names: list[str] = []
    pixels: list[np.ndarray] = []
    for split, file in files.items():
        images, classes = _read_pickle(file)
        for name, indices in sorted(classes.items()):
            names += [f"{split}/{name}/{index}" for index in indices.tolist()]
            pixels += [images[index] for index in indices.tolist()]
    return ArraySpec((3, SIDE, SIDE), names, (image.transpose(2, 0, 1) for image in pixels))


def _read_pickle(file: Path) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    contents = restricted_pickle.load_file(file)
    try:
        key = "image_data" if "image_data" in contents else "data"
        images = to_images(contents[key], (SIDE, SIDE, 3))
        if "image_data" in contents:
            classes = _class_indices(contents["class_dict"], len(images))
        else:
            labels = to_integers(contents["labels"], len(images))
            names = {
                int(to_integers([label], 1)[0]): to_text(name)
                for name, label in contents["catname2label"].items()
            }
            classes = {
                names.get(label, f"{file.stem} {label}"): np.flatnonzero(labels == label)
                for label in np.unique(labels).tolist()
            }
    except CONTENT_ERRORS as error:
        raise UserError(
            f"{file} is no cache of MiniImageNet ({error_with_type(error)}): it needs "
            f"image_data, uint8 of shape (n, {SIDE}, {SIDE}, 3), with class_dict, or data of that "
            "shape with labels and catname2label."
        ) from error
    return images, classes


def _class_indices(class_dict: dict[Any, Any], images: int) -> dict[str, np.ndarray]:
    """The image indices of each class, after checking that they are in range and unique."""
    if len(class_dict) > images:
        raise ValueError(f"it has {len(class_dict)} classes for {images} images")
    used = np.zeros(images, dtype=bool)
    classes: dict[str, np.ndarray] = {}
    for name, values in class_dict.items():
        indices = to_integers(values, images)
        if len(indices) and not 0 <= indices.min() <= indices.max() < images:
            raise ValueError(f"a class names an image beyond its {images}")
        if used[indices].any() or len(np.unique(indices)) != len(indices):
            raise ValueError("an image is named twice")
        used[indices] = True
        classes[to_text(name)] = indices
    return classes
