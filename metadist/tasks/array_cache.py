"""Arrays that are costly to make, made once and kept in a file that every process maps."""

import contextlib
import json
import logging
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from filelock import FileLock, Timeout

from metadist.errors import UserError

LOCK_SECONDS = 300.0
"""How long a process waits for another that prepares the same file."""

_log = logging.getLogger(__name__)


class NamedArray(NamedTuple):
    """An array and the name of each of its rows.

    Attributes:
        array: uint8, read-only and mapped from a file when it comes from one.
        names: a name a row.
    """

    array: np.ndarray
    names: list[str]


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
            and about["crc32"] == zlib.crc32(array)
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, EOFError, AttributeError):
        sound = False
    if not sound:
        _log.warning("%s is damaged and will not be used", path)
        return None
    return NamedArray(array, about["names"])


def load_or_make(
    path: Path, make: Callable[[], NamedArray], also_at: Sequence[Path] = ()
) -> NamedArray:
    """The array at `path`; made, if it is missing or damaged, by one process for all.

    Of several processes that come together one makes the array while the others wait for it;
    a process that dies meanwhile leaves neither a lock nor a partial array behind.

    Args:
        path: the `.npy` file; a `.json` file beside it holds the names and a check sum.
        make: makes the array, uint8.
        also_at: other places where somebody may have put the file.

    Raises:
        UserError: the directory cannot be written to, or another process holds it for longer
            than `LOCK_SECONDS`.
    """
    for place in (path, *also_at):
        if (found := load(place)) is not None:
            return found
    with locked(path, "set METADIST_CACHE to a directory that can be written to"):
        if (found := load(path)) is not None:
            return found
        _log.info("preparing %s", path)
        made = make()
        _save(path, made)
    # Read back, so that the maker too holds the file's pages and not a copy of its own.
    return load(path) or made


@contextlib.contextmanager
def locked(path: Path, remedy: str) -> Iterator[None]:
    """Hold the lock of a file that is to be made, its directory made if need be.

    The lock is the operating system's and ends with the process that holds it.

    Args:
        path: the file; its lock is `.NAME.lock` in the same directory.
        remedy: what the user can do when the directory cannot be written to.

    Raises:
        UserError: the lock cannot be made, or is not free within `LOCK_SECONDS`.
    """
    lock = FileLock(path.with_name(f".{path.name}.lock"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=LOCK_SECONDS)
    except Timeout as error:
        raise UserError(
            f"another process has been preparing {path} for {LOCK_SECONDS:.0f} seconds; wait for "
            f"it to end, or stop it, and start again"
        ) from error
    except OSError as error:
        raise UserError(f"cannot write to {path.parent} ({error.strerror}); {remedy}") from error
    try:
        yield
    finally:
        lock.release()


def _save(path: Path, made: NamedArray) -> None:
    array = np.ascontiguousarray(made.array)
    about = {"names": made.names, "crc32": zlib.crc32(array)}
    try:
        with _replacing(path) as file:
            np.save(file, array, allow_pickle=False)
        with _replacing(path.with_suffix(".json")) as file:
            file.write(json.dumps(about).encode())
    except OSError as error:
        raise UserError(
            f"cannot write {path} ({error.strerror}); make room there, or set METADIST_CACHE to "
            "another directory"
        ) from error


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator:
    """A binary file to write, which takes its name only when it is complete and on the disk."""
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
