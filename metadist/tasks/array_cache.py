"""Decode costly arrays once, into files that every process maps."""

import contextlib
import json
import logging
import os
import tokenize
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from filelock import FileLock, Timeout

from metadist.errors import UserError
from metadist.files import atomic_writer, partial_path, read_regular

LOCK_SECONDS = 300.0
"""Timeout of waiting for another process that prepares the same file but makes no progress."""

_CHUNK_BYTES = 1 << 22
_USER = os.getuid()

_log = logging.getLogger(__name__)


class CachedArray(NamedTuple):
    """An array with a name for each of its rows.

    Attributes:
        array: uint8, read-only and mapped from a file.
        names: one name per row.
    """

    array: np.ndarray
    names: list[str]


class ArraySpec(NamedTuple):
    """An array to be written row by row, so that it is never in memory as a whole.

    Attributes:
        row_shape: the shape of each row.
        names: one name per row.
        rows: the rows in order, uint8; each is written before the next is taken.
    """

    row_shape: tuple[int, ...]
    names: list[str]
    rows: Iterable[np.ndarray]


def cache_directory(root: Path) -> Path:
    """The directory for arrays decoded from files in `root`.

    Returns:
        `$METADIST_CACHE` if set; else `root` if it is writable; else `metadist` in
        `$XDG_CACHE_HOME` or `~/.cache`.

    Raises:
        UserError: `root` is not writable and there is no home directory.
    """
    if cache := os.environ.get("METADIST_CACHE"):
        return Path(cache).expanduser()
    if _is_writable(root):
        return root
    if user_cache := os.environ.get("XDG_CACHE_HOME"):
        return Path(user_cache) / "metadist"
    try:
        return Path.home() / ".cache" / "metadist"
    except RuntimeError as error:
        raise UserError(
            f"{root} cannot be written to and there is no home directory for a cache; set "
            "METADIST_CACHE to a directory that can be written to."
        ) from error


def load_or_create(root: Path, name: str, create: Callable[[], ArraySpec]) -> CachedArray:
    """Load a cached array of a dataset; create it if it is missing or damaged.

    One process creates the array while others wait; if it dies, neither a lock nor a partial array
    remains. A file's checksum is verified once: the process that verified it writes a marker with
    the file's size, times and inode, and while these are unchanged, the user's other processes only
    map the file.

    Args:
        root: the dataset's directory; searched after `cache_directory(root)`.
        name: the name of the `.npy` file; a `.json` file with the same stem has the rows' names
            and the checksum.
        create: a function that returns the array to write; called at most once.

    Raises:
        UserError: the cache directory cannot be written to, or another process holds the lock for
            `LOCK_SECONDS` without progress.
    """
    target = cache_directory(root) / name
    candidates = list(dict.fromkeys((target, root / name)))
    for path in candidates:
        if (cached := _load_verified(path, target)) is not None:
            return cached
    with contextlib.ExitStack() as stack:
        try:
            advice = "set METADIST_CACHE to a directory that can be written to"
            stack.enter_context(file_lock(target, advice))
        except UserError:  # an array that exists already needs no writable directory
            if cached := next(filter(None, (_load(path, target) for path in candidates)), None):
                return cached
            raise
        for path in candidates:
            if (cached := _load(path, target)) is not None:
                return cached
        _log.info("preparing %s", target)
        earlier = sorted(path.name for path in root.glob(f"{name.rpartition('_')[0]}_*.npy"))
        if earlier and target.parent == root:  # not in a cache that other datasets share
            _log.info("arrays of earlier images, which may be deleted: %s", ", ".join(earlier))
        _save(target, create())
        if (cached := _load(target, target)) is None:
            raise UserError(
                f"{target} was written and cannot be read back; check that disk, or set "
                "METADIST_CACHE to a directory on another."
            )
        return cached


def _load_verified(path: Path, target: Path) -> CachedArray | None:
    """The array at `path` if its checksum has been verified and it is unchanged since."""
    marker = _marker_path(target)
    try:
        verified = marker.stat().st_uid == _USER and marker.read_bytes() == _signature(path)
    except OSError:
        return None
    return _open(path, verify=False) if verified else None


def _load(path: Path, target: Path) -> CachedArray | None:
    """The array at `path`, verified unless it was before; None if it is missing or damaged."""
    if (cached := _load_verified(path, target)) is not None:
        return cached
    try:
        signature = _signature(path)
    except OSError:
        return None
    if (cached := _open(path, verify=True)) is None:
        _log.warning("%s is corrupt and will not be used", path)
        return None
    with contextlib.suppress(OSError):
        target.parent.mkdir(parents=True, exist_ok=True)
        with atomic_writer(_marker_path(target)) as file:
            file.write(signature)
    return cached


def _marker_path(target: Path) -> Path:
    """The file, next to `target` and one per user, with the signature of the verified array."""
    return target.with_name(f".{target.name}.{_USER}.verified")


def _signature(path: Path) -> bytes:
    """Bytes that change whenever one of an array's two files is replaced or written to."""
    files = (path, path.with_suffix(".json"))
    stats = [file.stat() for file in files]
    return json.dumps([[s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns] for s in stats]).encode()


def _open(path: Path, verify: bool) -> CachedArray | None:
    try:
        metadata = json.loads(read_regular(path.with_suffix(".json")))
        names = metadata["names"]
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        valid = (
            array.dtype == np.uint8
            and array.flags.c_contiguous
            and len(names) == len(array)
            and all(isinstance(name, str) for name in names)
            and (
                not verify
                or metadata["crc32"]
                == _crc32(path, array.offset, _header_crc32(names, array.shape))
            )
        )
    except _DAMAGED:
        return None
    return CachedArray(array, names) if valid else None


_DAMAGED = (
    *(OSError, ValueError, KeyError, TypeError, EOFError, AttributeError, RecursionError),
    *(SyntaxError, tokenize.TokenError),  # NumPy parses the header as Python
)


@contextlib.contextmanager
def file_lock(path: Path, advice: str) -> Iterator[None]:
    """Hold the lock of a file that is to be created, and create its directory.

    The operating system releases the lock when the process ends. Other processes keep waiting as
    long as the partial file grows.

    Args:
        path: the file's path; its lock is `.NAME.lock` in the same directory.
        advice: what the user can do if the directory cannot be written to.

    Raises:
        UserError: the lock file cannot be created, or the partial file has not grown for
            `LOCK_SECONDS`.
    """
    lock = FileLock(path.with_name(f".{path.name}.lock"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _acquire(lock, partial_path(path))
    except Timeout as error:
        raise UserError(
            f"another process has been preparing {path} for {LOCK_SECONDS:.0f} seconds without "
            "progress; wait for it to end, or stop it, and start again."
        ) from error
    except OSError as error:
        raise UserError(f"cannot write to {path.parent} ({error.strerror}); {advice}.") from error
    try:
        yield
    finally:
        lock.release()


def _acquire(lock: FileLock, partial: Path) -> None:
    while True:
        before = _size(partial)
        try:
            lock.acquire(timeout=LOCK_SECONDS)
            return
        except Timeout:
            if _size(partial) == before:
                raise


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _is_writable(directory: Path) -> bool:
    # For the root user, os.access is true even without any write permission.
    return os.access(directory, os.W_OK | os.X_OK) and bool(directory.stat().st_mode & 0o222)


def _header_crc32(names: list[str], shape: Sequence[int]) -> int:
    """Checksum of names and shape; the array's checksum continues it."""
    return zlib.crc32(json.dumps([names, list(shape)]).encode())


def _crc32(path: Path, offset: int, crc: int) -> int:
    """Checksum of a file from byte `offset` on, continuing `crc`.

    The file is read rather than mapped: mapped pages would count as the process's memory.
    """
    with path.open("rb") as file:
        file.seek(offset)
        while data := file.read(_CHUNK_BYTES):
            crc = zlib.crc32(data, crc)
    return crc


def _save(path: Path, spec: ArraySpec) -> None:
    shape = (len(spec.names), *spec.row_shape)
    crc, rows = _header_crc32(spec.names, shape), 0
    try:
        with atomic_writer(path, partial_path(path)) as file:
            header = {"descr": "|u1", "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
            for row in spec.rows:
                assert row.dtype == np.uint8
                assert row.shape == spec.row_shape
                data = np.ascontiguousarray(row).data
                file.write(data)
                crc = zlib.crc32(data, crc)
                rows += 1
            assert rows == len(spec.names), "one name per row"
        with atomic_writer(path.with_suffix(".json")) as file:
            file.write(json.dumps({"names": spec.names, "crc32": crc}).encode())
    except OSError as error:
        raise UserError(
            f"cannot write {path} ({error.strerror}); make room there, or set METADIST_CACHE to "
            "another directory."
        ) from error
