"""The files of CIFAR-100: where they may lie, how they are fetched, and how they are read."""

import gzip
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from metadist.errors import UserError
from metadist.tasks import data_files, downloads, plain_pickle
from metadist.tasks.array_cache import Making
from metadist.tasks.data_files import kind_and_line, looking_into, one_line

EXAMPLES = 600
"""Images a class, those of CIFAR-100's own training and test set together."""

SIDE = 32
"""Height and width in pixels."""

FOLDER = "cifar-100-python"
ARCHIVE = f"{FOLDER}.tar.gz"

_PARTS = ("train", "test", "meta")
_UNPACKED_BYTES = 1 << 30
_FORMAT = 1
"""Part of the digest; to be raised when the same files shall give another array."""


def find(root: Path) -> Path | None:
    """The folder or else the archive of CIFAR-100 in `root`, if it is there.

    Raises:
        UserError: `root` is not a directory or cannot be read.
    """
    with looking_into(root, "CIFAR-100"):
        if all((root / FOLDER / part).is_file() for part in _PARTS):
            return root / FOLDER
        return root / ARCHIVE if (root / ARCHIVE).is_file() else None


def where_to_get(root: Path) -> str:
    """What a user can do who lacks the files."""
    return (
        f"put {ARCHIVE} from https://www.cs.toronto.edu/~kriz/cifar.html into {root}, or set "
        "dataset.root to the directory that has it"
    )


def download(root: Path) -> None:
    """Fetch the archive into `root`; address and check sum are torchvision's.

    Raises:
        UserError: the download fails or `root` cannot be written to.
    """
    downloads.download(root / ARCHIVE, _published, "CIFAR-100", where_to_get(root))


def _published() -> tuple[str, str]:
    from torchvision.datasets import CIFAR100

    return CIFAR100.url, CIFAR100.tgz_md5


def digest(source: Path) -> str:
    """16 hexadecimal digits that change with the files' names, sizes and times."""
    files = [source] if source.is_file() else [source / part for part in _PARTS]
    return data_files.digest(((file.name, file) for file in files), _FORMAT)


def read(source: Path, names: Sequence[str]) -> Making:
    """Every image of some classes.

    Args:
        source: what `find` found.
        names: CIFAR-100's names of the classes, such as `maple_tree`.

    Returns:
        uint8 of shape (len(names), 600, 3, 32, 32), a class a row, training images first.

    Raises:
        UserError: the files are damaged or incomplete, or hold anything but plain data.
    """
    try:
        held = _from_folder(source) if source.is_dir() else _from_archive(source)
        known = [_text(name) for name in held["meta"]["fine_label_names"]]
        parts = [_images(held[part]) for part in ("train", "test")]
        places = [known.index(name) for name in names]
        members = [[np.flatnonzero(labels == p) for _, labels in parts] for p in places]
    except UserError:
        raise
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise UserError(
            f"{source} is no copy of CIFAR-100 ({kind_and_line(error)}); replace it by a "
            "complete copy"
        ) from error
    for name, of_part in zip(names, members, strict=True):
        if (count := sum(map(len, of_part))) != EXAMPLES:
            raise UserError(
                f"the class {name} of {source} has {count} images where CIFAR-100 has {EXAMPLES}; "
                "replace it by a complete copy"
            )

    def rows() -> Iterator[np.ndarray]:
        for of_part in members:
            pixels = [data[m] for (data, _), m in zip(parts, of_part, strict=True)]
            yield np.concatenate(pixels).reshape(EXAMPLES, 3, SIDE, SIDE)

    return Making((EXAMPLES, 3, SIDE, SIDE), list(names), rows())


def _images(held: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Images (n, 3072), a row for red, green and blue each, and their labels (n,)."""
    data, labels = held["data"], np.asarray(held["fine_labels"], dtype=np.int64)
    if data.dtype != np.uint8 or data.shape != (len(labels), 3 * SIDE * SIDE):
        raise ValueError(f"{len(labels)} labels for {data.dtype} of shape {data.shape}")
    return data, labels


def _from_folder(folder: Path) -> dict[str, dict[str, Any]]:
    return {part: _plain(plain_pickle.read_file(folder / part)) for part in _PARTS}


def _from_archive(archive: Path) -> dict[str, dict[str, Any]]:
    """The parts' contents. Nothing is unpacked to a disk, and other members are passed over."""
    held = {}
    try:
        with (
            gzip.open(archive) as unpacked,
            tarfile.open(fileobj=_Bounded(unpacked), mode="r|") as members,
        ):
            for member in members:
                folder, _, part = member.name.removeprefix("./").rpartition("/")
                if folder == FOLDER and part in _PARTS and member.isfile():
                    data = members.extractfile(member).read()
                    held[part] = _plain(plain_pickle.read(data, f"{member.name} in {archive}"))
    except UserError:
        raise
    except (OSError, EOFError, zlib.error, tarfile.TarError, ValueError) as error:
        raise UserError(
            f"{archive} is not a readable archive ({one_line(error)}); delete it and put the "
            "complete file there"
        ) from error
    return held


class _Bounded:
    """A file that ends in an error where a small archive would unpack to fill the memory."""

    def __init__(self, file: gzip.GzipFile) -> None:
        self.file = file
        self.left = _UNPACKED_BYTES

    def read(self, size: int) -> bytes:
        data = self.file.read(min(size, self.left + 1))
        self.left -= len(data)
        if self.left < 0:
            raise ValueError(f"it unpacks to more than {_UNPACKED_BYTES >> 30} GiB")
        return data


def _plain(found: Any) -> dict[str, Any]:
    return {_text(key): value for key, value in found.items()}


def _text(key: Any) -> str:
    return key.decode("utf-8") if isinstance(key, bytes) else str(key)
