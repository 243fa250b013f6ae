"""A run under way in Ray workers, as the process sees it that started them."""

import hashlib
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from omegaconf import OmegaConf

from metadist.launchers.error_reporting import wants_traceback
from metadist.launchers.job import RunSpec
from metadist.launchers.ray.board import Board, print_said
from metadist.launchers.ray.cluster import load_ray
from metadist.launchers.ray.fit import Fit, torch_trainer
from metadist.launchers.ray.worker import BEGUN, ENDED, REPORTED, SIGNAL, Errand, work

_STOP_SECONDS = 60.0
_PATIENCE_SECONDS = 90.0


class RayRun:
    """Starts a run's workers with Ray Train; close it in any case.

    Args:
        planned: the run; its directory is there, and Ray is open.
        num_workers: of the run.
        use_gpu: whether each worker has a GPU.
        max_failures: how often the run may lose workers and go on.
        storage_path: of Ray Train. Default: `ray/` in the run's directory.
        output: where the workers' standard output goes. Default: to this process's.
    """

    def __init__(
        self,
        planned: RunSpec,
        *,
        num_workers: int,
        use_gpu: bool,
        max_failures: int,
        storage_path: str | None = None,
        output: TextIO | None = None,
    ) -> None:
        load_ray()
        from metadist.launchers.ray.backend import PostReports

        self._max_failures = max_failures
        self._output = output
        self._signal = 0
        self._last = float("inf")
        self._patience = time.monotonic() + _PATIENCE_SECONDS
        self._seen = 0
        self._board = Board()
        name, path = "ray", str(planned.directory)
        if storage_path is not None:
            digest = hashlib.sha256(path.encode()).hexdigest()[:8]
            name, path = f"{planned.directory.name}-{digest}", storage_path
        errand = Errand(
            load_ray("ray.cloudpickle").dumps(planned),
            self._board,
            str(Path.cwd()),
            tuple(sys.path),
            wants_traceback(),
        )
        self._fit = Fit(
            torch_trainer(
                work,
                {"errand": load_ray("ray.cloudpickle").dumps(errand)},
                num_workers=num_workers,
                use_gpu=use_gpu,
                max_failures=max_failures,
                storage_path=path,
                name=name,
                keep=OmegaConf.select(planned.configuration, "trainer.keep_checkpoints", default=3),
                callbacks=[PostReports(self._board.actor, REPORTED)],
            )
        )

    def attend(self, seconds: float) -> bool:
        """Print what the workers say, for some seconds at most.

        Returns:
            Whether the run goes on; after a signal, not for much longer.
        """
        going_on = self._fit.is_running()
        if going_on and time.monotonic() > self._patience and not self._board.read(BEGUN):
            words = "waiting for the Ray cluster: others use its CPUs or GPUs, or it is slow"
            print(words, file=sys.stderr, flush=True)
            self._patience = float("inf")
        print_said(self._board, seconds if going_on else 0.0, self._output)
        return going_on and time.monotonic() < self._last

    def signal(self, number: int) -> None:
        """Pass a signal on: the run saves and ends; one that has not begun is given up."""
        if not self._signal:
            self._signal = number
            self._board.post(SIGNAL, number)
            begun = bool(self._board.read(BEGUN))
            self._last = time.monotonic() + (_STOP_SECONDS if begun else 0.0)
            if not begun:
                words = "stopped before the workers had begun: nothing new to save"
                print(words, file=sys.stderr, flush=True)

    def new_reports(self) -> list[dict[str, Any]]:
        """What rank zero has reported to Ray Train since the last call."""
        found = self._board.read(REPORTED, self._seen)
        self._seen += len(found)
        return found

    def status(self) -> int:
        """The exit status of a run that has ended: 1 when its workers were lost for good, or Ray
        itself could not carry it through.
        """
        ends = dict(self._board.read(ENDED))
        if any(ends.values()) or 0 in ends:  # rank zero has written the results
            return max(ends.values())
        if self._signal:
            return 128 + self._signal
        error = self._fit.error
        what = "Ray could not carry the run through"
        if isinstance(error, load_ray("ray.train").WorkerGroupError):
            what = (
                "the run's workers were lost once more than launcher.max_failures="
                f"{self._max_failures} allows"
            )
        reason = " ".join(str(error).split())[:300]
        print(
            f"error: {what} ({type(error).__name__}: {reason}); resume=auto goes on from the "
            "newest checkpoint",
            file=sys.stderr,
            flush=True,
        )
        return 1

    def close(self) -> None:
        """Let go of what the workers were told through."""
        self._board.remove()
