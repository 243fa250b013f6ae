"""The file layouts of MiniImageNet: find and decode each of them."""

import csv
import os
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from metadist.errors import UserError
from metadist.tasks import data_files, restricted_pickle
from metadist.tasks.array_cache import ArraySpec
from metadist.tasks.data_files import decode_image, error_with_type, root_errors, unreadable
from metadist.tasks.restricted_pickle import to_integers, to_text

CLASSES = {"train": 64, "validation": 16, "test": 20}
"""Number of classes of each split in Ravi and Larochelle."""

EXAMPLES = 600
"""Images per class."""

SIDE = 84
"""Height and width in pixels."""

_SHORT_NAMES = {"train": "train", "validation": "val", "test": "test"}
_PICKLES = (
    {split: f"mini-imagenet-cache-{short}.pkl" for split, short in _SHORT_NAMES.items()},
    {
        "train": "miniImageNet_category_split_train_phase_train.pickle",
        "validation": "miniImageNet_category_split_val.pickle",
        "test": "miniImageNet_category_split_test.pickle",
    },
)
_PLAIN_NAME = re.compile(r"(?!\.\.?$)[^/\\\0]+")
_SUFFIXES = (".jpg", ".jpeg", ".png")
MAX_IMAGE_BYTES = 1 << 26
MAX_IMAGE_PIXELS = 1 << 26
_FORMAT = 1
"""Part of the fingerprint; raise it when the same files are decoded to another array."""


class Layout(NamedTuple):
    """The files of one copy of MiniImageNet.

    Attributes:
        root: their directory.
        kind: "folders", "csv" or "pickles".
        files: for "csv" and "pickles" the file of each split.
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
        if all((root / short).is_dir() for short in _SHORT_NAMES.values()):
            return Layout(root, "folders", {})
        lists = {split: root / f"{short}.csv" for split, short in _SHORT_NAMES.items()}
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
        f"{', '.join(_PICKLES[0].values())}, or {', '.join(_PICKLES[1].values())}; ImageNet's "
        "terms do not allow a download"
    )


def fingerprint(layout: Layout) -> str:
    """16 hexadecimal digits that change with the files' names, sizes and times."""
    files = list(layout.files.values())
    if layout.kind == "folders":
        for short in _SHORT_NAMES.values():
            files += [f for each in _folders(layout.root / short) for f in _images(each)]
    elif layout.kind == "csv":
        files += [f for members in _listed(layout).values() for f in members]
    return data_files.fingerprint((("/".join(file.parts[-2:]), file) for file in files), _FORMAT)


def decode(layout: Layout) -> ArraySpec:
    """Decode every image of MiniImageNet.

    Returns:
        uint8 of shape (100, 600, 3, 84, 84), a row per class, training classes first and each split
        sorted by names such as `train/n01532829`.

    Raises:
        UserError: a file is missing, cannot be read or decoded, or has the wrong contents.
    """
    classes: Mapping[str, _PickledClass | list[Path]]
    rows: Iterator[np.ndarray]
    if layout.kind == "pickles":
        classes = pickled = _in_pickles(layout)
        rows = (each.pixels() for each in pickled.values())
    else:
        classes = files = _listed(layout) if layout.kind == "csv" else _in_folders(layout)
        rows = _decoded(list(files.values()))
    _check({name: len(members) for name, members in classes.items()}, layout)
    return ArraySpec((EXAMPLES, 3, SIDE, SIDE), list(classes), rows)


def _check(found: dict[str, int], layout: Layout) -> None:
    """Check the numbers of classes and images, and that splits share no class."""
    split_of: dict[str, str] = {}
    for split, label in (name.split("/", 1) for name in found):
        if label in split_of:
            raise UserError(
                f"the class {label} of {layout.root} is in {split_of[label]} and in {split}, where "
                "a class belongs to one split; use the files of Ravi and Larochelle's split"
            )
        split_of[label] = split
    for split, expected in CLASSES.items():
        source = layout.files.get(split, layout.root / _SHORT_NAMES[split])
        classes = [name for name in found if name.startswith(f"{split}/")]
        if len(classes) != expected:
            raise UserError(
                f"{source} has {len(classes)} classes where Ravi and Larochelle's split has "
                f"{expected}; replace it with a complete copy"
            )
        for name in classes:
            if found[name] != EXAMPLES:
                raise UserError(
                    f"the class {name.partition('/')[2]} in {source} has {found[name]} images "
                    f"where MiniImageNet has {EXAMPLES}; replace it with a complete copy"
                )


# --- image files -------------------------------------------------------------------------------


def _in_folders(layout: Layout) -> dict[str, list[Path]]:
    return {
        f"{split}/{folder.name}": _images(folder)
        for split, short in _SHORT_NAMES.items()
        for folder in _folders(layout.root / short)
    }


def _folders(parent: Path) -> list[Path]:
    try:
        return sorted(p for p in parent.iterdir() if p.is_dir() and not p.name.startswith("."))
    except OSError as error:
        raise UserError(unreadable(parent, error)) from error


def _images(folder: Path) -> list[Path]:
    return [
        folder / name
        for name in sorted(_names(folder))
        if name.lower().endswith(_SUFFIXES) and not name.startswith(".")
    ]


def _names(folder: Path) -> set[str]:
    try:
        return set(os.listdir(folder))  # noqa: PTH208  (names alone are ten times as fast)
    except OSError as error:
        raise UserError(unreadable(folder, error)) from error


def _listed(layout: Layout) -> dict[str, list[Path]]:
    """The images of the lists by class, in `images/` or a subfolder of it for each class."""
    images = layout.root / "images"
    present = _names(images)
    members: dict[str, list[Path]] = {}
    missing: dict[Path, list[str]] = {}
    for split, file in layout.files.items():
        lines = list(_lines(file))
        labels = {label for _, label in lines}
        folders = {label: _names(images / label) for label in labels & present}
        found: dict[str, set[str]] = {}
        for name, label in lines:
            if name in present:
                found.setdefault(label, set()).add(name)
            elif name in folders.get(label, ()):
                found.setdefault(label, set()).add(f"{label}/{name}")
            else:
                missing.setdefault(file, []).append(name)
        for label in sorted(found):
            members[f"{split}/{label}"] = [images / name for name in sorted(found[label])]
    if missing:
        details = [
            f"{len(names)} that {file} names ({', '.join(names[:3])}{', …' * (len(names) > 3)})"
            for file, names in missing.items()
        ]
        raise UserError(
            f"{images} lacks images: {' and '.join(details)}; put them there, or use the lists "
            "that belong to the images"
        )
    return members


def _lines(file: Path) -> Iterator[tuple[str, str]]:
    """File names and labels of a list whose first line is `filename,label`."""
    try:
        with file.open(newline="", encoding="utf-8-sig") as lines:
            rows = csv.reader(lines)
            if next(rows, None) != ["filename", "label"]:
                raise ValueError("its first line is not filename,label")
            for row in rows:
                # The list is untrusted: a name must not lead out of the folder.
                if len(row) != 2 or not all(_PLAIN_NAME.fullmatch(part) for part in row):
                    raise ValueError(f"line {rows.line_num} is {','.join(row)[:100]!r}")
                yield row[0], row[1]
    except OSError as error:
        raise UserError(unreadable(file, error)) from error
    except (ValueError, csv.Error) as error:
        raise UserError(
            f"{file} is no list of images ({error}); it needs the first line filename,label and "
            "then a file's name and its class in each"
        ) from error


def _decoded(classes: list[list[Path]]) -> Iterator[np.ndarray]:
    # Pillow releases the GIL while it decodes, and other processes wait for this one.
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for files in classes:
            row = np.empty((EXAMPLES, 3, SIDE, SIDE), dtype=np.uint8)
            for index, pixels in enumerate(pool.map(_image, files)):
                row[index] = pixels.transpose(2, 0, 1)
            yield row


def _image(file: Path) -> np.ndarray:
    try:
        with file.open("rb") as opened:
            data = opened.read(MAX_IMAGE_BYTES + 1)
        if len(data) > MAX_IMAGE_BYTES:
            raise ValueError(f"it is larger than {MAX_IMAGE_BYTES >> 20} MiB")
        return decode_image(data, "RGB", SIDE, ("JPEG", "PNG"), MAX_IMAGE_PIXELS)
    except OSError as error:
        raise UserError(unreadable(file, error)) from error
    except ValueError as error:
        raise UserError(
            f"{file} cannot be decoded as a JPEG or PNG image ({error}); replace it"
        ) from error


# --- pickles -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _PickledClass:
    """The images of one class among all images of a file, uint8 (n, 84, 84, 3)."""

    images: np.ndarray
    indices: np.ndarray

    def __len__(self) -> int:
        return len(self.indices)

    def pixels(self) -> np.ndarray:
        return self.images[self.indices].transpose(0, 3, 1, 2)


def _in_pickles(layout: Layout) -> dict[str, _PickledClass]:
    """The classes of the pickles, images still in the mapped files.

    A pickle has `image_data`, uint8 of shape (n, 84, 84, 3), and `class_dict`, the indices of each
    class's images (Ren et al. 2018, arXiv 1803.00676); or `data` of that shape, the images'
    `labels`, and `catname2label` (Gidaris and Komodakis 2018, arXiv 1804.09458).
    """
    return {
        f"{split}/{name}": _PickledClass(images, indices)
        for split, file in layout.files.items()
        for images, classes in [_read_pickle(file)]
        for name, indices in sorted(classes.items())
    }


def _read_pickle(file: Path) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    contents = restricted_pickle.load_file(file)
    try:
        images = contents["image_data" if "image_data" in contents else "data"]
        if not isinstance(images, np.ndarray):
            raise TypeError(f"its images are a {type(images).__name__}")
        if images.dtype != np.uint8 or images.shape[1:] != (SIDE, SIDE, 3):
            raise ValueError(f"its images are {images.dtype} of shape {images.shape}")
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
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise UserError(
            f"{file} is no cache of MiniImageNet ({error_with_type(error)}): it needs "
            f"image_data, uint8 of shape (n, {SIDE}, {SIDE}, 3), with class_dict, or data of that "
            "shape with labels and catname2label"
        ) from error
    return images, classes


def _class_indices(class_dict: dict[Any, Any], images: int) -> dict[str, np.ndarray]:
    """The indices of each class, none beyond the number of images and none twice."""
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
