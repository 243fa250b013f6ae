"""The layouts in which people have MiniImageNet, and how its images are read from each."""

import csv
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from metadist.errors import UserError
from metadist.tasks import data_files, image_files, mini_imagenet_pickles
from metadist.tasks.array_cache import Making
from metadist.tasks.data_files import looking_into, unreadable

CLASSES = {"train": 64, "validation": 16, "test": 20}
"""Classes of each part in Ravi and Larochelle's split."""

EXAMPLES = 600
"""Images a class."""

SIDE = 84
"""Height and width in pixels."""

_PARTS = {"train": "train", "validation": "val", "test": "test"}
_PICKLES = (
    {part: f"mini-imagenet-cache-{short}.pkl" for part, short in _PARTS.items()},
    {
        "train": "miniImageNet_category_split_train_phase_train.pickle",
        "validation": "miniImageNet_category_split_val.pickle",
        "test": "miniImageNet_category_split_test.pickle",
    },
)
_PLAIN_NAME = re.compile(r"(?!\.\.?$)[^/\\\0]+")
_SUFFIXES = (".jpg", ".jpeg", ".png")
_IMAGE_BYTES = 1 << 26
_IMAGE_PIXELS = 1 << 26
_FORMAT = 1
"""Part of the digest; to be raised when the same files shall give another array."""


class Layout(NamedTuple):
    """The files of one copy of MiniImageNet.

    Attributes:
        root: the directory that they lie in.
        kind: "folders", "csv" or "pickles".
        files: for "pickles" the file of each part; for "csv" the list of each part.
    """

    root: Path
    kind: str
    files: dict[str, Path]


def find(root: Path) -> Layout | None:
    """The first layout that is there in full: folders, lists, pickles; None when there is none.

    Raises:
        UserError: `root` is not a directory or cannot be read.
    """
    with looking_into(root, "MiniImageNet"):
        if all((root / short).is_dir() for short in _PARTS.values()):
            return Layout(root, "folders", {})
        lists = {part: root / f"{short}.csv" for part, short in _PARTS.items()}
        if (root / "images").is_dir() and all(path.is_file() for path in lists.values()):
            return Layout(root, "csv", lists)
        for names in _PICKLES:
            files = {part: root / name for part, name in names.items()}
            if all(path.is_file() for path in files.values()):
                return Layout(root, "pickles", files)
    return None


def accepted(root: Path) -> str:
    """The sentence for a directory that has none of the layouts."""
    there = sorted(path.name for path in root.iterdir())[:5] if root.is_dir() else []
    return (
        f"{root} has none of the layouts of MiniImageNet (it has {', '.join(there) or 'nothing'}): "
        "put there the folders train, val and test with a folder of images for each class, or "
        "images/ with train.csv, val.csv and test.csv, or "
        f"{', '.join(_PICKLES[0].values())}, or {', '.join(_PICKLES[1].values())}; ImageNet's "
        "terms do not allow a download"
    )


def digest(layout: Layout) -> str:
    """16 hexadecimal digits that change with the files' names, sizes and times."""
    files = list(layout.files.values())
    if layout.kind == "folders":
        for short in _PARTS.values():
            files += [f for each in _folders(layout.root / short) for f in _images(each)]
    elif layout.kind == "csv":
        files += [f for members in _listed(layout).values() for f in members]
    return data_files.digest((("/".join(file.parts[-2:]), file) for file in files), _FORMAT)


def decode(layout: Layout) -> Making:
    """Every image of MiniImageNet, once.

    Returns:
        uint8 of shape (100, 600, 3, 84, 84), a class a row, training classes first and each part
        in the order of its names, such as `train/n01532829`.

    Raises:
        UserError: a file is missing, cannot be read or decoded, or holds what it should not.
    """
    if layout.kind == "pickles":
        classes = mini_imagenet_pickles.classes(layout.files, SIDE)
        rows = (each.pixels() for each in classes.values())
    else:
        classes = _listed(layout) if layout.kind == "csv" else _in_folders(layout)
        rows = _decoded(list(classes.values()))
    _check({name: len(members) for name, members in classes.items()}, layout)
    return Making((EXAMPLES, 3, SIDE, SIDE), list(classes), rows)


def _check(found: dict[str, int], layout: Layout) -> None:
    """Refuse other than Ravi and Larochelle's numbers of classes and images, and common classes."""
    home: dict[str, str] = {}
    for part, label in (name.split("/", 1) for name in found):
        if label in home:
            raise UserError(
                f"the class {label} of {layout.root} is in {home[label]} and in {part}, where a "
                "class belongs to one part; take the files of Ravi and Larochelle's split"
            )
        home[label] = part
    for part, expected in CLASSES.items():
        where = layout.files.get(part, layout.root / _PARTS[part])
        classes = [name for name in found if name.startswith(f"{part}/")]
        if len(classes) != expected:
            raise UserError(
                f"{where} has {len(classes)} classes where Ravi and Larochelle's split has "
                f"{expected}; replace it by a complete copy"
            )
        for name in classes:
            if found[name] != EXAMPLES:
                raise UserError(
                    f"the class {name.partition('/')[2]} in {where} has {found[name]} images "
                    f"where MiniImageNet has {EXAMPLES}; replace it by a complete copy"
                )


# --- files of images ---------------------------------------------------------------------------


def _in_folders(layout: Layout) -> dict[str, list[Path]]:
    return {
        f"{part}/{folder.name}": _images(folder)
        for part, short in _PARTS.items()
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
    """The images that the lists name, by class; in `images/`, or a folder of it a class."""
    images = layout.root / "images"
    there = _names(images)
    members: dict[str, list[Path]] = {}
    missing: dict[Path, list[str]] = {}
    for part, file in layout.files.items():
        lines = list(_lines(file))
        labels = {label for _, label in lines}
        folders = {label: _names(images / label) for label in labels & there}
        found: dict[str, set[str]] = {}
        for name, label in lines:
            if name in there:
                found.setdefault(label, set()).add(name)
            elif name in folders.get(label, ()):
                found.setdefault(label, set()).add(f"{label}/{name}")
            else:
                missing.setdefault(file, []).append(name)
        for label in sorted(found):
            members[f"{part}/{label}"] = [images / name for name in sorted(found[label])]
    if missing:
        told = [
            f"{len(names)} that {file} names ({', '.join(names[:3])}{', …' * (len(names) > 3)})"
            for file, names in missing.items()
        ]
        raise UserError(
            f"{images} lacks images: {' and '.join(told)}; put them there, or take the lists that "
            "belong to them"
        )
    return members


def _lines(file: Path) -> Iterator[tuple[str, str]]:
    """Names and labels of a list, whose first line is `filename,label`."""
    try:
        with file.open(newline="", encoding="utf-8-sig") as lines:
            rows = csv.reader(lines)
            if next(rows, None) != ["filename", "label"]:
                raise ValueError("its first line is not filename,label")
            for row in rows:
                # A list may come from anywhere: it names files of its own folder and no others.
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
    # Pillow lets go of the interpreter while it decodes, and the other workers only wait.
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for files in classes:
            row = np.empty((EXAMPLES, 3, SIDE, SIDE), dtype=np.uint8)
            for index, pixels in enumerate(pool.map(_image, files)):
                row[index] = pixels.transpose(2, 0, 1)
            yield row


def _image(file: Path) -> np.ndarray:
    try:
        with file.open("rb") as opened:
            data = opened.read(_IMAGE_BYTES + 1)
        if len(data) > _IMAGE_BYTES:
            raise ValueError(f"it is larger than {_IMAGE_BYTES >> 20} MiB")
        return image_files.decode_image(data, "RGB", SIDE, ("JPEG", "PNG"), _IMAGE_PIXELS)
    except OSError as error:
        raise UserError(unreadable(file, error)) from error
    except ValueError as error:
        raise UserError(
            f"{file} cannot be decoded as a JPEG or PNG image ({error}); put a sound copy there"
        ) from error
