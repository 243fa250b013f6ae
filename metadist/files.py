"""Files: atomic writes, reads that do not wait for pipes, locks, and errors that name the file."""

import errno
import fcntl
import os
import secrets
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import BinaryIO

from metadist.errors import UserError

REDIRECT_RUN = "choose another directory with hydra.run.dir=DIR (of a sweep: hydra.sweep.dir=DIR)"
REDIRECT_OUTPUT = "choose another file with --output"
REDIRECT_PLOT = "choose another directory"
REDIRECT_REPLAY = "replay a task of a copy of the directory"
REDIRECT_REPORT = "run `metadist report` on a copy of the directory"
"""What the user can do if a file of a run, of a command with `--output`, a plot, a file of a replay
or of a report cannot be written."""


@contextmanager
def wrap_write_errors(target: Path | str, redirect: str = REDIRECT_RUN) -> Iterator[None]:
    """Raise an `OSError` of the block as a `UserError` that names `target`.

    Args:
        target: the file or stream that the block writes.
        redirect: the advice to choose another target, as the end of a sentence.
    """
    try:
        yield
    except OSError as error:
        advice = "free some space or fix the permissions"
        if isinstance(error, BrokenPipeError):
            advice = "keep the program running that reads it"
        elif isinstance(error, FileNotFoundError | NotADirectoryError):
            advice = "create its directory"
        raise UserError(
            f"cannot write {target} ({error.strerror or error}): {advice}, or {redirect}."
        ) from error


def prepare_output(path: Path) -> None:
    """Create the directory of a file that a command writes at its end.

    Raises:
        UserError: the path is a directory, a pipe or a device, which would be replaced by a file,
            or "-", or no file of this name can be written.
    """
    if str(path) == "-":
        raise UserError(
            "--output - does not stand for the standard output: give the path of a file."
        )
    if path.exists() and not path.is_file():
        kind = "directory" if path.is_dir() else "pipe or a device"
        raise UserError(f"--output {path} is a {kind}: give the path of a file.")
    with wrap_write_errors(path, REDIRECT_OUTPUT):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = _temporary_path(path)
        temporary.touch(exist_ok=False)
        temporary.unlink()


def replace_closed_streams() -> None:
    """Read nothing and discard what is printed on streams that were closed before the start."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115


def discard_output() -> None:
    """Discard what is printed from now on, after the reader of the standard output has ended."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def locked_directory(directory: Path) -> Iterator[None]:
    """Hold an exclusive lock of a directory, which is created. It ends with the process at latest.

    Where the file system has no locks, other processes are not excluded.

    Raises:
        BlockingIOError: another process holds the lock.
        OSError: the directory cannot be created.
    """
    directory.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:  # NFS cannot lock a directory
            pass
        yield
    finally:
        os.close(descriptor)


def partial_path(path: Path) -> Path:
    """The temporary path of a file that one process writes while others wait for it."""
    return path.with_name(f".{path.name}.part")


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading. A named pipe, which could be waited for without end, is refused.

    Raises:
        OSError: the file cannot be opened, or is a directory, a pipe or a device.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "it is a pipe or a device, not a file", str(path))


def read_regular(path: Path, errors: str = "strict", within: Path | None = None) -> str:
    """The text of a file in UTF-8; see `open_regular`.

    Args:
        path: the path of the file.
        errors: what is done with bytes that are not UTF-8; see `bytes.decode`.
        within: the directory that the file must be in. A report on a directory of somebody else
            must not contain a file of the user's own that a link in it names.

    Raises:
        OSError: the file cannot be read, or is not within the directory.
    """
    if within is not None and not path.resolve().is_relative_to(within.resolve()):
        reason = f"it is a link to a file outside of {within}"
        raise OSError(errno.EINVAL, reason, str(path))
    with open_regular(path) as file:
        return file.read().decode("utf-8", errors)


@contextmanager
def atomic_writer(path: Path, temporary: Path | None = None) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `path` at the end of the block. A crash leaves either the
    old file or the new one.

    Args:
        path: the path of the file.
        temporary: the path of the temporary file, in the same directory. Default: a new one, so
            that processes that write the same file at once each write a whole one. It stays if the
            process is killed.

    Raises:
        OSError: the file cannot be written; the old file is unchanged.
    """
    if temporary is None:
        temporary = _temporary_path(path)
    try:
        # Created, so that no link of that name is followed.
        temporary.unlink(missing_ok=True)
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync_directory(path.parent)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def atomic_write(path: Path, content: bytes, redirect: str = REDIRECT_RUN) -> None:
    """Write a file as a whole; see `atomic_writer`.

    Args:
        path: the path of the file.
        content: what the file will contain.
        redirect: see `wrap_write_errors`.

    Raises:
        UserError: the file cannot be written; an old file is unchanged.
    """
    with wrap_write_errors(path, redirect), atomic_writer(path) as file:
        file.write(content)


def rename_to_next_number(*paths: Path) -> None:
    """Move files out of the way, if they exist: NAME becomes NAME.1, or the first number that is
    free for all of them.
    """
    for number in count(1):
        numbered = [path.with_name(f"{path.name}.{number}") for path in paths]
        if not any(name.exists() for name in numbered):
            break
    for path, name in zip(paths, numbered, strict=True):
        with suppress(FileNotFoundError):
            path.rename(name)


def _temporary_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")


def _sync_directory(directory: Path) -> None:
    """Make a rename durable. Some file systems (FUSE) cannot; the file is intact all the same."""
    try:
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
