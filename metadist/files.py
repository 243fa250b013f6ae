"""Writing files: atomically, and with errors that name the file."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from metadist.errors import UserError

REDIRECT_RUN = "choose another directory with hydra.run.dir=DIR"
REDIRECT_OUTPUT = "choose another file with --output"
REDIRECT_REPORT = "run `metadist report` on a copy of the directory"
"""What to do about a file that cannot be written: of a run, of a command with that option, or of a
report."""


@contextmanager
def wrap_write_errors(target: Path | str, redirect: str = REDIRECT_RUN) -> Iterator[None]:
    """Raise an `OSError` of the block as a `UserError` that names `target`.

    Args:
        target: the file or stream that the block writes.
        redirect: how the user has it written elsewhere, as the end of a sentence.
    """
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write {target} ({error.strerror or error}): free some space or fix the "
            f"permissions, or {redirect}"
        ) from error


def atomic_write(path: Path, content: bytes) -> None:
    """Write `path` so that a crash leaves either the old file or the new one.

    Raises:
        OSError: it cannot be written; the old file is unchanged.
    """
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
    # Makes the rename durable; some file systems do not support fsync on a directory.
    with suppress(OSError):
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
