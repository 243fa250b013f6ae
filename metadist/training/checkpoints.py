"""Checkpoints: written whole or not at all, checked when read, never unpickled."""

import contextlib
import hashlib
import io
import os
import pickle
import re
from pathlib import Path
from typing import Any

import torch

from metadist.errors import UserError

FORMAT = 1
"""Version of the layout of a checkpoint's contents."""

_FOOTER = b"metadist-sha256:"
_NAME = re.compile(r"iteration-(\d+)\.pt")


class Checkpoints:
    """The checkpoints of one run. Rank zero writes; every rank that trains reads.

    A file is what `torch.save` writes, followed by a digest of it; `torch.load` reads it as it
    is. The newest `keep` are kept, and the best one beside them.

    Args:
        directory: the run's `checkpoints/`.
        keep: how many of the newest to keep, at least one.
    """

    def __init__(self, directory: Path, keep: int = 2) -> None:
        self.directory = directory
        self.keep = keep

    @property
    def best(self) -> Path:
        """Where the best checkpoint lies."""
        return self.directory / "best.pt"

    def iterations(self) -> list[tuple[int, Path]]:
        """The numbered checkpoints, oldest first, as (finished iterations, path)."""
        if not self.directory.is_dir():
            return []
        found = [(_NAME.fullmatch(path.name), path) for path in self.directory.iterdir()]
        return sorted((int(match[1]), path) for match, path in found if match)

    def save(self, iteration: int, contents: dict[str, Any]) -> Path:
        """Write the checkpoint of an iteration, then drop those older than the newest `keep`."""
        path = self.directory / f"iteration-{iteration:08d}.pt"
        write_checkpoint(path, contents)
        for _, old in self.iterations()[: -self.keep]:
            old.unlink(missing_ok=True)
        return path

    def save_best(self, contents: dict[str, Any]) -> None:
        """Write the best checkpoint anew."""
        write_checkpoint(self.best, contents)

    def newest(self) -> Path | None:
        """The newest numbered checkpoint, if there is any."""
        found = self.iterations()
        return found[-1][1] if found else None


def write_checkpoint(path: Path, contents: dict[str, Any]) -> None:
    """Write tensors and plain containers so that the file is either whole or not there.

    Raises:
        UserError: the disk is full or the directory cannot be written.
    """
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, **contents}, buffer)
    data = buffer.getvalue()
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(data)
            file.write(_FOOTER + hashlib.sha256(data).hexdigest().encode())
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise UserError(
            f"the checkpoint {path} could not be written ({error.strerror}); earlier checkpoints "
            "are whole: free some space or choose another hydra.run.dir, then use resume=auto."
        ) from None


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The contents of a checkpoint, on the CPU.

    Raises:
        UserError: no file, a truncated or altered one, or one of another format.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(
            f"the checkpoint {path} cannot be read ({error.strerror}): give resume= the path of a "
            "checkpoint file, or auto for the newest one of the run's directory."
        ) from None
    length = len(_FOOTER) + 64
    body, footer = data[:-length], data[-length:]
    if footer != _FOOTER + hashlib.sha256(body).hexdigest().encode():
        raise UserError(
            f"the checkpoint {path} is damaged or no checkpoint of metadist (its digest does not "
            "match its contents): resume from another one of the same folder."
        )
    try:
        contents = torch.load(io.BytesIO(body), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise UserError(
            f"the checkpoint {path} holds more than tensors and plain values and is not opened "
            f"({str(error).splitlines()[0]}): resume from a checkpoint that metadist wrote."
        ) from None
    if contents.get("format") != FORMAT:
        raise UserError(
            f"the checkpoint {path} has format {contents.get('format')}, written by metadist "
            f"{contents.get('version', 'of an unknown version')}; this version reads format "
            f"{FORMAT}: resume it with the version that wrote it."
        )
    return contents
