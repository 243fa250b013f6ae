"""Arrays that are costly to make, made once and kept in a file that every process maps."""

import contextlib
import json
import logging
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from filelock import FileLock, Timeout

from metadist.errors import UserError

LOCK_SECONDS = 300.0
"""How long a process waits for another that prepares the same file and gets nowhere."""

_CHUNK = 1 << 22

_log = logging.getLogger(__name__)


class NamedArray(NamedTuple):
    """An array and the name of each of its rows.

    Attributes:
        array: uint8, read-only and mapped from a file.
        names: a name a row.
    """

    array: np.ndarray
    names: list[str]


class Making(NamedTuple):
    """An array that is still to be made, row by row, so that it never lies in memory whole.

    Attributes:
        row_shape: the shape of each row.
        names: a name a row.
        rows: the rows in order, uint8; each is written to the file before the next is asked for.
    """

    row_shape: tuple[int, ...]
    names: list[str]
    rows: Iterable[np.ndarray]


def cache_directory(root: Path) -> Path:
    """Where arrays made from files in `root` are kept.

    Returns:
        `$METADIST_CACHE` if set; else `root` if it can be written to; else `metadist` in
        `$XDG_CACHE_HOME` or `~/.cache`.

    Raises:
        UserError: `root` cannot be written to and there is no home directory.
    """
    if chosen := os.environ.get("METADIST_CACHE"):
        return Path(chosen).expanduser()
    if writable(root):
        return root
    if users := os.environ.get("XDG_CACHE_HOME"):
        return Path(users) / "metadist"
    try:
        return Path.home() / ".cache" / "metadist"
    except RuntimeError as error:
        raise UserError(
            f"{root} cannot be written to and there is no home directory for a cache; set "
            "METADIST_CACHE to a directory that can be written to"
        ) from error


def writable(directory: Path) -> bool:
    """Whether files may be made in an existing directory, by its permissions."""
    # The superuser may write anywhere; a directory that nobody may write to is still respected.
    return os.access(directory, os.W_OK | os.X_OK) and bool(directory.stat().st_mode & 0o222)


def load(path: Path) -> NamedArray | None:
    """The array at `path`, or None when there is none or it is damaged."""
    try:
        about = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        sound = (
            array.dtype == np.uint8
            and array.flags.c_contiguous
            and len(about["names"]) == len(array)
            and about["crc32"] == _crc32(path, array.offset, _crc32_of(about["names"], array.shape))
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, EOFError, AttributeError):
        sound = False
    if not sound:
        _log.warning("%s is damaged and will not be used", path)
        return None
    return NamedArray(array, about["names"])


def load_any(root: Path, stem: str) -> NamedArray | None:
    """An array `STEM_*.npy` in `root`, for those who copied nothing but the finished array."""
    for path in sorted(root.glob(f"{stem}_*.npy")):
        if (found := load(path)) is not None:
            return found
    return None


def load_or_make(
    path: Path, make: Callable[[], Making], also_at: Sequence[Path] = ()
) -> NamedArray:
    """The array at `path`; made, if it is missing or damaged, by one process for all.

    Of several processes that come together one makes the array while the others wait for it;
    a process that dies meanwhile leaves neither a lock nor a partial array behind. No more than
    a row of the array is held in memory.

    Args:
        path: the `.npy` file; a `.json` file beside it holds the names and a check sum.
        make: says how the array is made.
        also_at: other places where somebody may have put the file.

    Raises:
        UserError: the directory cannot be written to, or another process holds it for longer
            than `LOCK_SECONDS` without getting on.
    """
    for place in (path, *also_at):
        if (found := load(place)) is not None:
            return found
    with locked(path, "set METADIST_CACHE to a directory that can be written to"):
        if (found := load(path)) is not None:
            return found
        _log.info("preparing %s", path)
        _save(path, make())
    if (found := load(path)) is None:
        raise UserError(
            f"{path} was written and cannot be read back; check that disk, or set METADIST_CACHE "
            "to a directory on another"
        )
    return found


@contextlib.contextmanager
def locked(path: Path, remedy: str) -> Iterator[None]:
    """Hold the lock of a file that is to be made, its directory made if need be.

    The lock is the operating system's and ends with the process that holds it. Others wait as
    long as the holder's `.NAME.part` file grows.

    Args:
        path: the file; its lock is `.NAME.lock` in the same directory.
        remedy: what the user can do when the directory cannot be written to.

    Raises:
        UserError: the lock cannot be made, or is not free when nothing has grown for
            `LOCK_SECONDS`.
    """
    lock = FileLock(path.with_name(f".{path.name}.lock"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _acquire(lock, part_of(path))
    except Timeout as error:
        raise UserError(
            f"another process has been preparing {path} for {LOCK_SECONDS:.0f} seconds without "
            "getting on; wait for it to end, or stop it, and start again"
        ) from error
    except OSError as error:
        raise UserError(f"cannot write to {path.parent} ({error.strerror}); {remedy}") from error
    try:
        yield
    finally:
        lock.release()


def part_of(path: Path) -> Path:
    """The name under which a file is written until it is complete."""
    return path.with_name(f".{path.name}.part")


def _acquire(lock: FileLock, part: Path) -> None:
    while True:
        before = _size(part)
        try:
            lock.acquire(timeout=LOCK_SECONDS)
            return
        except Timeout:
            if _size(part) == before:
                raise


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _crc32_of(names: list[str], shape: Sequence[int]) -> int:
    """Of what says how the array is to be read; that of the array itself goes on from it."""
    return zlib.crc32(json.dumps([names, list(shape)]).encode())


def _crc32(path: Path, offset: int, crc: int) -> int:
    """Of a file from `offset` on, read rather than mapped: mapped pages would count as memory.

    Args:
        path: the file.
        offset: in bytes.
        crc: the check sum to go on from.
    """
    with path.open("rb") as file:
        file.seek(offset)
        while data := file.read(_CHUNK):
            crc = zlib.crc32(data, crc)
    return crc


def _save(path: Path, making: Making) -> None:
    shape = (len(making.names), *making.row_shape)
    crc, rows = _crc32_of(making.names, shape), 0
    try:
        with _replacing(path) as file:
            header = {"descr": "|u1", "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
            for row in making.rows:
                assert row.dtype == np.uint8 and row.shape == making.row_shape
                data = np.ascontiguousarray(row).data
                file.write(data)
                crc = zlib.crc32(data, crc)
                rows += 1
            assert rows == len(making.names), "a name a row"
        with _replacing(path.with_suffix(".json")) as file:
            file.write(json.dumps({"names": making.names, "crc32": crc}).encode())
    except OSError as error:
        raise UserError(
            f"cannot write {path} ({error.strerror}); make room there, or set METADIST_CACHE to "
            "another directory"
        ) from error


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A binary file to write, which takes its name only when it is complete and on the disk."""
    part = part_of(path)
    try:
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
