"""A write that fails is the user's to mend, and is said in one sentence."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from metadist.errors import UserError


@contextmanager
def writing(what: Path | str) -> Iterator[None]:
    """Turns an `OSError` within the block into a `UserError` that names what was written.

    Args:
        what: the file or stream, as the user knows it.
    """
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write {what} ({error.strerror or error}): free some space or mend the "
            "permissions there, or choose another directory with hydra.run.dir=DIR"
        ) from error


def replace_file(path: Path, content: bytes) -> None:
    """Puts `content` at `path` so that a crash leaves either the old file or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise
    # The rename itself lies in the directory; not every file system lets one sync that.
    with suppress(OSError):
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
