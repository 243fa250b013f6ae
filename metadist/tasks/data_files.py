"""Files of datasets: looked for, told apart, and what is said when that fails."""

import contextlib
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from metadist.errors import UserError


@contextlib.contextmanager
def looking_into(root: Path, dataset: str) -> Iterator[None]:
    """Say in a sentence why a dataset's files cannot be looked for in `root`.

    Raises:
        UserError: `root` is a file or cannot be read.
    """
    try:
        if root.is_file():
            raise UserError(
                f"dataset.root is {root}, which is a file; give the directory of {dataset}"
            )
        yield
    except OSError as error:
        raise UserError(
            f"dataset.root {root} cannot be read ({error.strerror}); allow it, or give another "
            "directory"
        ) from error


def digest(files: Iterable[tuple[str, Path]], *also: object) -> str:
    """16 hexadecimal digits that change with the files' names, sizes and times, and with `also`.

    Args:
        files: each with the name that it is known by, which does not depend on where it lies.
        also: anything else that the result follows from, such as an image size.

    Raises:
        UserError: a file cannot be read.
    """
    about = hashlib.blake2b(repr(also).encode(), digest_size=8)
    for name, file in files:
        try:
            status = file.stat()
        except OSError as error:
            raise UserError(unreadable(file, error)) from error
        about.update(repr((name, status.st_size, status.st_mtime_ns)).encode())
    return about.hexdigest()


def unreadable(path: Path | str, error: OSError) -> str:
    """The sentence for a file that the operating system does not let us read."""
    return f"{path} cannot be read ({error.strerror}); allow it, or put another copy there"


def one_line(error: BaseException) -> str:
    """An error's message in one line of bounded length."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def kind_and_line(error: BaseException) -> str:
    """The same after the error's kind, for those whose message is but a word."""
    return f"{type(error).__name__}: {one_line(error)}"
