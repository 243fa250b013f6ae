"""Checkpoint files: written atomically, verified by a digest, loaded without unpickling."""

import hashlib
import math
import os
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import torch

from metadist import __version__
from metadist.errors import UserError
from metadist.files import atomic_writer, open_regular
from metadist.reports import CHECKPOINT_DIRECTORY
from metadist.reports.file_schema import Contents, mismatch

FORMAT = 2
"""Version of the layout of a checkpoint's contents; 1 had no learning-rate schedule."""

_FOOTER = b"metadist-sha256:"
_FOOTER_BYTES = len(_FOOTER) + 64
_NAME = re.compile(r"(iteration|best)-(\d+)\.pt")
_CHUNK = 1 << 20


class CorruptCheckpointError(UserError):
    """A checkpoint file that is truncated, altered or of another kind."""


class Checkpoints:
    """The checkpoints of one run. Rank zero writes; every rank that trains reads.

    A run resumes from `iteration-00000200.pt`; the newest `keep` of them are kept.
    `best-00000150.pt` is the best checkpoint by validation. For each kept checkpoint, the best one
    up to its iteration is kept too, so that a run can resume from any of them; for the newest,
    which may have been saved before its validation, also the best one before. A file is the output
    of `torch.save`, followed by its digest; `torch.load` can read it.

    Args:
        run: the run's directory.
        keep: number of newest checkpoints to keep, at least one.
    """

    def __init__(self, run: Path, keep: int = 3) -> None:
        self.directory = run / CHECKPOINT_DIRECTORY
        self.keep = keep
        self._verified = False

    def iterations(self) -> list[tuple[int, Path]]:
        """The numbered checkpoints, oldest first, as (finished iterations, path)."""
        return self._named("iteration")

    def bests(self) -> list[tuple[int, Path]]:
        """The checkpoints that were the best when they were written, oldest first."""
        return self._named("best")

    @property
    def best(self) -> Path | None:
        """The best checkpoint so far, None before the first validation."""
        bests = self.bests()
        return bests[-1][1] if bests else None

    def newest(self) -> Path | None:
        """The newest numbered checkpoint; None if there is none."""
        checkpoints = self.iterations()
        return checkpoints[-1][1] if checkpoints else None

    def save(self, iteration: int, contents: dict[str, Any]) -> Path:
        """Write the checkpoint of an iteration, then delete those that are not kept."""
        path = self.path(iteration)
        self._write(path, contents)
        for _, old in self.iterations()[: -self.keep]:
            old.unlink(missing_ok=True)
        self._delete_bests()
        return path

    def save_best(self, iteration: int, contents: dict[str, Any]) -> Path:
        """Write the best checkpoint so far, then delete those that are not kept."""
        path = self.best_path(iteration)
        self._write(path, contents)
        self._delete_bests()
        return path

    def path(self, iteration: int) -> Path:
        """The file of the numbered checkpoint of an iteration."""
        return self.directory / f"iteration-{iteration:08d}.pt"

    def best_path(self, iteration: int) -> Path:
        """The file of the best checkpoint of an iteration."""
        return self.directory / f"best-{iteration:08d}.pt"

    def candidates(self) -> list[Path]:
        """The checkpoints to resume from, in the order to try: newest first.

        Of one iteration, the numbered one, which is written after the best one, comes first.
        """
        return [path for _, path in sorted([*self.iterations(), *self.bests()], reverse=True)]

    def first_candidate(self) -> Path:
        """The newest checkpoint.

        Raises:
            UserError: there is none.
        """
        candidates = self.candidates()
        if not candidates:
            raise UserError(
                f"{self.directory.parent} holds no checkpoint: give the directory of a run, or "
                "the path of a checkpoint file."
            )
        return candidates[0]

    def rename_later(self, iteration: int) -> None:
        """Rename the checkpoints of later iterations, and delete incompletely written files."""
        for number, path in self.iterations() + self.bests():
            if number > iteration:
                rename_checkpoint(path, "superseded")
        if self.directory.is_dir():
            for part in self.directory.glob(".*.part"):
                part.unlink(missing_ok=True)

    def _write(self, path: Path, contents: dict[str, Any]) -> None:
        """Write a file. The first one is read back, to check that its contents can be loaded.

        Raises:
            TypeError: the contents hold other types than tensors and plain values.
        """
        write_checkpoint(path, contents)
        if self._verified:
            return
        try:
            read_checkpoint(path)
        except CorruptCheckpointError as error:
            path.unlink()
            raise TypeError(
                "the states of optimizer, scheduler and callbacks must hold tensors, numbers, "
                f"strings, None, and containers of them, or the run cannot be saved: {error}"
            ) from None
        self._verified = True

    def _named(self, kind: str) -> list[tuple[int, Path]]:
        if not self.directory.is_dir():
            return []
        matches = [(_NAME.fullmatch(path.name), path) for path in self.directory.iterdir()]
        return sorted(
            (int(match[2]), path) for match, path in matches if match and match[1] == kind
        )

    def _delete_bests(self) -> None:
        bests, iterations = self.bests(), [iteration for iteration, _ in self.iterations()]
        # The newest checkpoint may have been saved before its validation.
        limits = [math.inf, *iterations, *(newest - 1 for newest in iterations[-1:])]
        kept = {max((n for n, _ in bests if n <= limit), default=-1) for limit in limits}
        for number, path in bests:
            if number not in kept:
                path.unlink(missing_ok=True)


def rename_checkpoint(path: Path, suffix: str) -> Path:
    """Rename a checkpoint to NAME.SUFFIX, so that no run resumes from it; return its new path."""
    renamed = path.with_name(f"{path.name}.{suffix}")
    number = 1
    while renamed.exists():
        renamed, number = path.with_name(f"{path.name}.{suffix}.{number}"), number + 1
    return path.rename(renamed)


class _DigestWriter:
    """A binary file that computes the digest of the written bytes.

    An OSError in `write` is raised by `finish`, because `torch.save` would replace it by another
    exception.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.sha256 = hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        """Write bytes and return their number."""
        if self.error is None:
            self.sha256.update(data)
            try:
                self.file.write(data)
            except OSError as error:
                self.error = error
        return memoryview(data).nbytes

    def flush(self) -> None:
        """Does nothing: the file is flushed at the end."""

    def finish(self) -> None:
        """Append the digest.

        Raises:
            OSError: the file could not be written.
        """
        if self.error is not None:
            raise self.error
        self.file.write(_FOOTER + self.sha256.hexdigest().encode())


def write_checkpoint(path: Path, contents: dict[str, Any]) -> None:
    """Write tensors and plain containers atomically.

    The number of the format and metadist's version are added. The file is streamed, without a copy
    in memory.

    Raises:
        UserError: the disk is full or the directory cannot be written.
    """
    try:
        path.parent.mkdir(exist_ok=True)  # in the run's directory, which exists
        with atomic_writer(path) as file:
            writer = _DigestWriter(file)
            header = {"format": FORMAT, "version": __version__}
            torch.save({**header, **contents}, writer)  # type: ignore[arg-type]  # write is enough
            writer.finish()
    except OSError as error:
        raise UserError(
            f"the checkpoint {path} could not be written ({error.strerror}); earlier checkpoints "
            "are intact: free some space or choose another hydra.run.dir, then use resume=auto."
        ) from None


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The contents of a checkpoint, on the CPU.

    Raises:
        CorruptCheckpointError: the file is truncated, altered or not a checkpoint.
        UserError: the file cannot be read, or is an intact checkpoint of another format.
    """
    try:
        with open_regular(path) as file:
            _check_digest(path, file)
            contents = _load(path, file)
    except OSError as error:
        raise UserError(
            f"the checkpoint {path} cannot be read ({error.strerror}): give the path of a "
            "checkpoint file."
        ) from None
    if not isinstance(contents, dict) or "format" not in contents:
        raise CorruptCheckpointError(
            f"the checkpoint {path} was not written by metadist: resume from a checkpoint "
            "that metadist wrote."
        )
    if contents["format"] != FORMAT:
        raise UserError(
            f"the checkpoint {path} has format {contents['format']}, written by metadist "
            f"{contents.get('version', 'of an unknown version')}; this is metadist "
            f"{__version__}, which reads format {FORMAT}: resume it with the version that "
            "wrote it."
        )
    if reason := mismatch(contents, Contents):
        raise CorruptCheckpointError(
            f"the checkpoint {path} is damaged ({reason}): give another one."
        )
    return contents


def _check_digest(path: Path, file: BinaryIO) -> None:
    left = max(0, os.fstat(file.fileno()).st_size - _FOOTER_BYTES)
    sha256 = hashlib.sha256()
    while left and (data := file.read(min(_CHUNK, left))):
        sha256.update(data)
        left -= len(data)
    if file.read() != _FOOTER + sha256.hexdigest().encode():
        raise CorruptCheckpointError(
            f"the checkpoint {path} is corrupt or no checkpoint of metadist (its digest does not "
            "match its contents): give another one, or a weights file."
        )


def _load(path: Path, file: BinaryIO) -> Any:
    """Load tensors and plain values; refuse anything else, and compressed data."""
    try:
        with zipfile.ZipFile(file) as archive:
            compressed = any(
                member.compress_size != member.file_size for member in archive.infolist()
            )
        if compressed:
            raise pickle.UnpicklingError("its uncompressed size exceeds its size")
        file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=True)
    except (
        pickle.UnpicklingError,
        zipfile.BadZipFile,
        # torch.load raises these for malformed contents.
        RuntimeError,
        EOFError,
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        AttributeError,
        AssertionError,
    ) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        reason = next((line.strip() for line in lines if "Unsupported" in line), lines[0])
        raise CorruptCheckpointError(
            f"the checkpoint {path} holds something else than tensors and plain values and is not "
            f"loaded ({reason[:200]}): resume from a checkpoint that metadist wrote."
        ) from None
