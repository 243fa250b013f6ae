"""What a run in Ray workers tells Ray Train: its newest figures and its newest checkpoint.

Ray Train wants every worker's word for each report, and not every strategy runs the loop on every
rank; so the reports are made beside the run, by a thread of each worker, from what rank zero has
written in the run's directory. That directory stays the truth: Ray's storage holds the same
checkpoints, as hard links where it lies on the same file system.
"""

import contextlib
import json
import os
import shutil
import tempfile
import threading
from pathlib import Path
from typing import Any

import ray.train
from ray.train import Checkpoint, CheckpointUploadMode

from metadist.distributed import get_rank
from metadist.distributed.world import restart_count
from metadist.launchers.ray.board import Board
from metadist.training.checkpoints import Checkpoints

_LOOK_SECONDS = 0.3
_LAST_REPORT_SECONDS = 60.0
_END = "end"


class Reports:
    """Reports of one attempt at a run. Every rank makes one, and calls `start` and `finish`.

    Args:
        directory: the run's.
        board: the workers'.
    """

    def __init__(self, directory: Path, board: Board) -> None:
        self._directory = directory
        self._checkpoints = Checkpoints(directory / "checkpoints")
        self._board = board
        self._topic = f"reports/{restart_count()}"
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._report, name="reports", daemon=True)]
        if get_rank() == 0:
            self._threads.append(threading.Thread(target=self._look, name="look", daemon=True))

    def start(self) -> None:
        """Begin; what is there by now is not reported again."""
        self._reported = self._checkpoints.newest()
        self._record = _Record(self._directory / "metrics.jsonl", _iteration(self._reported))
        for thread in self._threads:
            thread.start()

    def finish(self) -> None:
        """The run has ended well: report its end, with all other ranks, then return."""
        self._over.set()
        for thread in self._threads:
            thread.join(_LAST_REPORT_SECONDS)

    # --- rank zero -------------------------------------------------------------------------------

    def _look(self) -> None:
        record, last = self._record, False
        while not last:
            last = self._over.wait(_LOOK_SECONDS)  # and then look once more
            newest = self._checkpoints.newest()
            saved = newest if newest != self._reported else None
            validations = record.new_validations()
            for number, figures in enumerate(validations):
                path = saved if number == len(validations) - 1 else None
                self._board.post(self._topic, {"metrics": figures, "checkpoint": path})
            if saved is not None and not validations:
                figures = {"iteration": _iteration(saved)} | record.newest
                self._board.post(self._topic, {"metrics": figures, "checkpoint": saved})
            self._reported = newest
        self._board.post(self._topic, _END)

    # --- every rank ------------------------------------------------------------------------------

    def _report(self) -> None:
        place = 0
        while True:
            for word in self._board.read(self._topic, place, seconds=5.0):
                place += 1
                if word == _END:
                    return
                self._report_one(word["metrics"], word["checkpoint"])

    def _report_one(self, metrics: dict[str, Any], path: Path | None) -> None:
        if get_rank() != 0 or path is None:
            ray.train.report(metrics)
            return
        storage = ray.train.get_context().get_storage()
        place = Path(storage.experiment_fs_path) / f"checkpoint_{path.stem}"
        try:
            if storage.storage_filesystem.type_name != "local":
                raise OSError("not a file system of this machine")
            place.mkdir(parents=True, exist_ok=True)
            target = place / path.name
            target.unlink(missing_ok=True)
            os.link(path, target)
        except OSError:
            self._copy(metrics, path)
            return
        ray.train.report(
            metrics,
            Checkpoint(str(place), storage.storage_filesystem),
            checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,
        )

    @staticmethod
    def _copy(metrics: dict[str, Any], path: Path) -> None:
        """Let Ray bring a checkpoint to a storage of another kind or on another file system."""
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            with contextlib.suppress(FileNotFoundError):  # an older one, which is gone by now
                shutil.copy2(path, folder)
                checkpoint = Checkpoint.from_directory(folder)
            ray.train.report(metrics, checkpoint, checkpoint_dir_name=f"checkpoint_{path.stem}")


class _Record:
    """Follows a run's `metrics.jsonl` while it is written.

    Args:
        path: the file; it may not be there yet, and a run that resumes may replace it by what is
            left of it. What is in it now is known already.
        done: so are the iterations up to here.
    """

    def __init__(self, path: Path, done: int) -> None:
        self._path = path
        self._done = done
        self._loss: dict[str, float] = {}
        self._file: tuple[int, int] = (0, 0)  # which one, and how much of it has been read
        self._new_lines()
        self.newest: dict[str, Any] = {}
        """The newest validation's figures and its training loss."""

    def new_validations(self) -> list[dict[str, Any]]:
        """The figures of the validations since the last call, each with `train_loss`."""
        found = []
        for line in self._new_lines():
            record = json.loads(line)
            iteration = record.get("iteration", 0)
            if "train_loss" in record:
                self._loss = {"train_loss": float(record["train_loss"])}
            if "validation_loss" in record and iteration > self._done:
                self._done = iteration
                figures = {n: float(v) for n, v in record.items() if n != "iteration"}
                self.newest = {"iteration": iteration} | self._loss | figures
                found.append(self.newest)
        return found

    def _new_lines(self) -> list[bytes]:
        try:
            with self._path.open("rb") as file:
                number = os.fstat(file.fileno()).st_ino
                start = self._file[1] if number == self._file[0] else 0
                file.seek(start)
                text = file.read()
        except OSError:
            return []
        whole = text[: text.rfind(b"\n") + 1]  # the last line may be half written
        self._file = (number, start + len(whole))
        return whole.splitlines()


def _iteration(checkpoint: Path | None) -> int:
    return int(checkpoint.stem.rpartition("-")[2]) if checkpoint else 0


def bring_checkpoint(directory: Path) -> None:
    """Put Ray's newest checkpoint into a run's directory that has none. Any rank.

    It is for a worker that starts again where the run's directory is not: on another machine. One
    that is there knows better: what Ray keeps may be of a course that the run has left.
    """
    newest = ray.train.get_checkpoint()
    checkpoints = Checkpoints(directory / "checkpoints")
    if newest is None or checkpoints.newest() is not None:
        return
    with newest.as_directory() as folder:
        for path in Path(folder).glob("iteration-*.pt"):
            target = checkpoints.directory / path.name
            target.parent.mkdir(parents=True, exist_ok=True)
            part = target.with_name(f".{path.name}.{os.getpid()}.part")
            shutil.copy2(path, part)
            part.replace(target)
