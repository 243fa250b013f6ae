"""Find and decode MiniImageNet in any of its file layouts."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from metadist.errors import UserError
from metadist.tasks import data_files, image_files, restricted_pickle
from metadist.tasks.array_cache import ArraySpec
from metadist.tasks.data_files import error_with_type, root_errors
from metadist.tasks.image_files import SHORT_NAMES, ImageClass
from metadist.tasks.restricted_pickle import CONTENT_ERRORS, to_images, to_integers, to_text

CLASSES = {"train": 64, "validation": 16, "test": 20}
"""The number of classes in each split of Ravi and Larochelle."""

EXAMPLES = 600
"""Images per class."""

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
_FORMAT = 1
"""Part of the fingerprint; raise it when the same files are decoded to another array."""


class Layout(NamedTuple):
    """The files of one copy of MiniImageNet.

    Attributes:
        root: the directory of the files.
        kind: "folders", "csv" or "pickles".
        files: the file of each split for "csv" and "pickles"; empty for "folders".
    """

    root: Path
    kind: str
    files: dict[str, Path]


def find(root: Path) -> Layout | None:
    """The first complete layout among folders, lists and pickles; None without one.

    Raises:
        UserError: `root` is not a directory or cannot be read.
    """
    with root_errors(root, "MiniImageNet"):
        if all((root / short).is_dir() for short in SHORT_NAMES.values()):
            return Layout(root, "folders", {})
        lists = {split: root / f"{short}.csv" for split, short in SHORT_NAMES.items()}
        if (root / "images").is_dir() and all(path.is_file() for path in lists.values()):
            return Layout(root, "csv", lists)
        for names in _PICKLES:
            files = {split: root / name for split, name in names.items()}
            if all(path.is_file() for path in files.values()):
                return Layout(root, "pickles", files)
    return None


def no_layout(root: Path) -> str:
    """The error message for a directory without any of the layouts."""
    names = sorted(path.name for path in root.iterdir())[:5] if root.is_dir() else []
    return (
        f"{root} has none of the layouts of MiniImageNet (it has {', '.join(names) or 'nothing'}): "
        "put there the folders train, val and test with a folder of images for each class, or "
        "images/ with train.csv, val.csv and test.csv, or "
        f"{', '.join(_PICKLES[0].values())}, or {', '.join(_PICKLES[2].values())}; or run "
        "metadist fetch mini_imagenet."
    )


def fingerprint(layout: Layout) -> str:
    """16 hexadecimal digits that change with the files' names, sizes and times."""
    files = list(layout.files.values())
    if layout.kind != "pickles":
        files += [file for image_class in _image_classes(layout) for file in image_class.files]
    named = [(file.relative_to(layout.root).as_posix(), file) for file in files]
    return data_files.fingerprint(named, _FORMAT)


def decode(layout: Layout) -> ArraySpec:
    """Decode all images of MiniImageNet.

    Returns:
        uint8 of shape (100, 600, 3, 84, 84), one row per class, training classes first and each
        split sorted by names such as `train/n01532829`.

    Raises:
        UserError: a file is missing, cannot be read or decoded, or has the wrong contents.
    """
    rows: Iterator[np.ndarray]
    if layout.kind == "pickles":
        pickled = _in_pickles(layout)
        counts = {name: len(indices) for name, (_, indices) in pickled.items()}
        rows = (images[indices].transpose(0, 3, 1, 2) for images, indices in pickled.values())
    else:
        classes = _image_classes(layout)
        counts = {f"{item.split}/{item.name}": len(item.files) for item in classes}
        rows = _rows(classes)
    _check(counts, layout)
    return ArraySpec((EXAMPLES, 3, SIDE, SIDE), list(counts), rows)


def _image_classes(layout: Layout) -> list[ImageClass]:
    return image_files.find_classes(layout.root, "MiniImageNet")


def _rows(classes: list[ImageClass]) -> Iterator[np.ndarray]:
    """The decoded images of each class, which has `EXAMPLES` files."""
    files = [file for item in classes for file in item.files]
    images = image_files.decode_files(files, "RGB", SIDE)
    for _ in classes:
        yield np.stack(list(itertools.islice(images, EXAMPLES)))


def _check(counts: dict[str, int], layout: Layout) -> None:
    """Check the numbers of classes and images, and that splits share no class."""
    pairs = ((split, label) for split, _, label in (name.partition("/") for name in counts))
    image_files.check_disjoint(pairs, layout.root)
    for split, expected in CLASSES.items():
        source = layout.files.get(split, layout.root / SHORT_NAMES[split])
        classes = [name for name in counts if name.startswith(f"{split}/")]
        if len(classes) != expected:
            raise UserError(
                f"the number of classes in {source} is {len(classes)}, in Ravi and Larochelle's "
                f"split {expected}; replace it with a complete copy."
            )
        for name in classes:
            if counts[name] != EXAMPLES:
                raise UserError(
                    f"the class {name.partition('/')[2]} in {source} has {counts[name]} images "
                    f"where MiniImageNet has {EXAMPLES}; replace it with a complete copy."
                )


# --- pickles -----------------------------------------------------------------------------------


def _in_pickles(layout: Layout) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """All images of each class's pickle, a view of the mapped file, and the indices of its own.

    A pickle has `image_data`, uint8 of shape (n, 84, 84, 3), and `class_dict`, the indices of each
    class's images (Ren et al. 2018, arXiv 1803.00676); or `data` of that shape, the images'
    `labels`, and `catname2label` (Gidaris and Komodakis 2018, arXiv 1804.09458).
    """
    return {
        f"{split}/{name}": (images, indices)
        for split, file in layout.files.items()
        for images, classes in [_read_pickle(file)]
        for name, indices in sorted(classes.items())
    }


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
