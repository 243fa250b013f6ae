"""Find and decode image files that are in class folders or named by lists."""

import csv
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from metadist.errors import UserError
from metadist.files import open_regular
from metadist.tasks.data_files import decode_image, unreadable

SPLIT_NAMES = {
    "train": ("train",),
    "validation": ("val", "validation", "valid"),
    "test": ("test",),
}
"""The accepted names of each split's folder or list."""

SHORT_NAMES = {split: names[0] for split, names in SPLIT_NAMES.items()}
"""The published names of the splits in few-shot datasets: train, val and test."""

FORMATS = {
    ".jpg": "JPEG", ".jpeg": "JPEG", ".png": "PNG", ".bmp": "BMP", ".gif": "GIF",
    ".tif": "TIFF", ".tiff": "TIFF", ".webp": "WEBP", ".ppm": "PPM", ".pgm": "PPM",
}  # fmt: skip
"""Pillow's names of the accepted formats, by file suffix."""

MAX_IMAGE_BYTES = 1 << 26
MAX_IMAGE_PIXELS = 1 << 26
_PLAIN_NAME = re.compile(r"(?!\.\.?$)[^/\\\0]+")
_CHUNK = 256
"""The number of images that are decoded before the next ones are read."""

_T = TypeVar("_T")
_R = TypeVar("_R")


class ImageClass(NamedTuple):
    """The image files of one class.

    Attributes:
        split: the class's split; empty if the directory is not divided into splits.
        name: the class's name.
        files: the image files, in order.
    """

    split: str
    name: str
    files: list[Path]

    @property
    def full_name(self) -> str:
        """`SPLIT/NAME`, or `NAME` without a split."""
        return f"{self.split}/{self.name}" if self.split else self.name


def find_classes(root: Path) -> list[ImageClass]:
    """The classes in a directory, sorted by split and name.

    The directory has one of these layouts, in this order of precedence:

    - folders `train`, `val` (or `validation` or `valid`) and `test`, with a folder of images for
      each class;
    - `images/` with `train.csv`, `val.csv` (or `validation.csv`) and `test.csv`;
    - a folder of images for each class.

    A class has all images in its folder and in folders below it, including linked folders. Hidden
    files and folders are ignored.

    Args:
        root: the directory.

    Raises:
        UserError: a folder or file cannot be read, a list is damaged, or two class folders are one,
            by a link.
    """
    folders = _of_splits(root, "", Path.is_dir)
    if "train" in folders and len(folders) > 1:
        return _classes((s, folder) for s, p in folders.items() for folder in subfolders(p))
    only_splits = len(folders) == len(subfolders(root))
    if folders and only_splits and all(map(subfolders, folders.values())):
        missing = [split for split in SPLIT_NAMES if split not in folders]
        raise UserError(
            f"{root} has folders of classes in {', '.join(p.name for p in folders.values())}, "
            f"and none of {', '.join(missing)}: add them, or give the directory of the classes."
        )
    lists = _of_splits(root, ".csv", Path.is_file)
    if lists and (root / "images").is_dir():
        return list(read_lists(root / "images", lists))
    return class_folders(root)


def find_classes_of_splits(root: Path) -> list[ImageClass]:
    """As `find_classes`, but empty unless there are folders or lists for all three splits."""
    folders = _of_splits(root, "", Path.is_dir)
    lists = _of_splits(root, ".csv", Path.is_file) if (root / "images").is_dir() else {}
    return find_classes(root) if len(SPLIT_NAMES) in (len(folders), len(lists)) else []


def class_folders(root: Path) -> list[ImageClass]:
    """A class for each folder in a directory, without splits.

    Raises:
        UserError: a folder cannot be read, or two of them are one, by a link.
    """
    return _classes(("", folder) for folder in subfolders(root))


def _classes(folders: Iterable[tuple[str, Path]]) -> list[ImageClass]:
    """The classes in some splits and folders."""
    first_names: dict[Path, Path] = {}
    classes = []
    for split, folder in folders:
        other = first_names.setdefault(folder.resolve(), folder)
        if other != folder:
            raise UserError(
                f"{other} and {folder} are one folder, by a link, and would be two classes with "
                "the same images: remove the link."
            )
        classes.append(ImageClass(split, folder.name, images_below(folder)))
    return classes


def _of_splits(root: Path, suffix: str, exists: Callable[[Path], bool]) -> dict[str, Path]:
    """The existing folder or list of each split."""
    split_paths = {}
    for split, names in SPLIT_NAMES.items():
        paths = [root / f"{name}{suffix}" for name in names]
        existing = [path for path in paths if exists(path)]
        if len(existing) > 1:
            raise UserError(
                f"{' and '.join(map(str, existing))} are both for {split}: keep one of them."
            )
        if existing:
            split_paths[split] = existing[0]
    return split_paths


def subfolders(parent: Path) -> list[Path]:
    """The folders in a folder, sorted, without hidden ones."""
    try:
        return sorted(
            path for path in parent.iterdir() if path.is_dir() and not path.name.startswith(".")
        )
    except OSError as error:
        raise UserError(unreadable(parent, error)) from error


def images_below(folder: Path) -> list[Path]:
    """The image files in a folder and in folders below it, sorted, without hidden ones."""

    def refuse(error: OSError) -> None:
        raise UserError(unreadable(error.filename or folder, error)) from error

    images: list[Path] = []
    visited = set(folder.resolve().parents)
    for path, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        resolved = Path(path).resolve()
        if resolved in visited:  # a link to a folder above
            folders.clear()
            continue
        visited.add(resolved)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        images += [
            Path(path, name)
            for name in sorted(names)
            if Path(name).suffix.lower() in FORMATS and not name.startswith(".")
        ]
    return images


def read_lists(images: Path, lists: Mapping[str, Path]) -> Iterator[ImageClass]:
    """The classes in lists with lines `filename,label`, as in Ravi and Larochelle's split.

    Args:
        images: the folder with the images or with a subfolder of images for each class.
        lists: the list of each split.

    Raises:
        UserError: a list is damaged, an image in a list does not exist, or an image is listed twice
            with different labels or splits.
    """
    present = _names(images)
    labels_of: dict[str, tuple[str, str]] = {}
    missing: dict[Path, list[str]] = {}
    for split, file in lists.items():
        lines = list(_lines(file))
        labels = {label for _, label in lines}
        folders = {label: _names(images / label) for label in labels & present}
        for name, label in lines:
            path = name if name in present else f"{label}/{name}"
            if name not in present and name not in folders.get(label, ()):
                missing.setdefault(file, []).append(name)
            elif (first := labels_of.setdefault(path, (split, label))) != (split, label):
                raise UserError(
                    f"{file} names {path} as {label} of {split}, and it is named as {first[1]} of "
                    f"{first[0]} too: name each image once."
                )
    if missing:
        details = [
            f"{len(names)} that {file} names ({', '.join(names[:3])}{', …' * (len(names) > 3)})"
            for file, names in missing.items()
        ]
        raise UserError(
            f"{images} lacks images: {' and '.join(details)}; put them there, or use the lists "
            "that belong to the images."
        )
    files: dict[tuple[str, str], list[Path]] = {}
    for path, split_and_label in sorted(labels_of.items()):
        files.setdefault(split_and_label, []).append(images / path)
    for split in lists:
        for label in sorted(label for each, label in files if each == split):
            yield ImageClass(split, label, files[split, label])


def _names(folder: Path) -> set[str]:
    try:
        return set(os.listdir(folder))  # noqa: PTH208  (names alone are ten times as fast)
    except OSError as error:
        raise UserError(unreadable(folder, error)) from error


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
            "then a file's name and its class in each."
        ) from error


def decode_files(files: Iterable[Path], mode: str, size: int) -> Iterator[np.ndarray]:
    """Decode image files in threads.

    Args:
        files: the paths of the files.
        mode: "L" for greyscale or "RGB".
        size: height and width of the results, in pixels.

    Returns:
        uint8 of shape (size, size) or (3, size, size), in the order of the files. While they are
        taken, a `UserError` names the first file that cannot be read or decoded.
    """

    def decode(file: Path) -> np.ndarray:
        pixels = decode_file(file, mode, size)
        return pixels.transpose(2, 0, 1) if mode == "RGB" else pixels

    return map_in_threads(decode, files)


def map_in_threads(decode: Callable[[_T], _R], images: Iterable[_T]) -> Iterator[_R]:
    """Decode images in threads, a chunk at a time; the results are in the order of the images.

    Pillow releases the GIL while it decodes. Other processes wait for this one meanwhile.
    """
    remaining = iter(images)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        while chunk := list(itertools.islice(remaining, _CHUNK)):
            yield from pool.map(decode, chunk)


def decode_file(file: Path, mode: str, size: int) -> np.ndarray:
    """Decode one image file; see `metadist.tasks.data_files.decode_image`.

    Raises:
        UserError: the file cannot be read or decoded.
    """
    try:
        with open_regular(file) as opened:
            data = opened.read(MAX_IMAGE_BYTES + 1)
        if len(data) > MAX_IMAGE_BYTES:
            raise ValueError(f"it is larger than {MAX_IMAGE_BYTES >> 20} MiB")
        formats = tuple(sorted({*FORMATS.values()}))
        return decode_image(data, mode, size, formats, MAX_IMAGE_PIXELS)
    except OSError as error:
        raise UserError(unreadable(file, error)) from error
    except ValueError as error:
        raise UserError(
            f"{file} cannot be decoded as an image ({error}); replace or delete it."
        ) from error
