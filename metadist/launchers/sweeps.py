"""The jobs of a sweep: how each ended, on all ranks alike, and what that means for the others."""

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from metadist.distributed import get_rank, get_world_size
from metadist.distributed.job import current_job
from metadist.distributed.meeting import exchange, world_store
from metadist.distributed.world import attempt
from metadist.errors import UserError
from metadist.launchers.carry_out import Failed, carry_out, figure_of
from metadist.launchers.composing import compose_once
from metadist.launchers.launcher import PlannedRun
from metadist.launchers.side_by_side import SideBySide
from metadist.launchers.speaking import (
    USER_ERROR_STATUS,
    Elsewhere,
    WorldEnded,
    say_and_go_on,
    sentence_of,
    speak,
)
from metadist.reports import pop_worker_error, write_failure, write_sweep_report
from metadist.training import Interrupted

_REPORT_SECONDS = 30.0
"""How long the other ranks of a sweep that failed wait for rank zero to write its report."""


class Sweep:
    """The sweep that this process runs.

    Attributes:
        directory: its jobs lie in DIR/0, DIR/1, …
        direction: "minimize" or "maximize" where the sweeper looks for the best figure.
        failed: the numbers of the jobs that failed in this process.
        worlds: those that a launcher has started for its jobs.
    """

    def __init__(self, directory: Path, direction: str) -> None:
        self.directory = directory
        self.direction = direction
        self.failed: list[int] = []
        self.worlds = SideBySide()


_sweep: Sweep | None = None


def current_sweep() -> Sweep | None:
    """The sweep whose sweeper runs in this process; None in a process that a launcher of Hydra's
    (joblib's, submitit's) started for a job, and where there is no sweep.
    """
    return _sweep


class NoteSweep(Callback):
    """Hydra's callback that tells metadist of a sweep as it begins."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """See Hydra's `Callback`."""
        global _sweep
        direction = str(config.hydra.sweeper.get("direction", "")).rpartition(".")[2].lower()
        _sweep = Sweep(Path(str(config.hydra.sweep.dir)).resolve(), direction)
        compose_once(config)


class JobFailed(Exception):
    """A sweep's job failed in a process of its own, which hands on why."""

    def __init__(self, number: int, sentence: str, exit_status: int) -> None:
        super().__init__(number, sentence, exit_status)
        self.number, self.sentence, self.exit_status = number, sentence, exit_status

    def __str__(self) -> str:
        return f"job {self.number}: {self.sentence}"


def on_failure_of(configuration: DictConfig) -> Literal["stop", "continue"]:
    """The configured `sweep.on_failure`.

    Raises:
        UserError: it is neither, or `sweep` has no options.
    """
    node = configuration.get("sweep")
    if not isinstance(node, DictConfig | None):
        raise UserError(
            f"sweep={node} does not fit: write sweep.on_failure=stop or sweep.on_failure=continue."
        )
    value = None if node is None else node.get("on_failure")
    unknown = [str(key) for key in node or () if key != "on_failure"]
    if unknown:
        raise UserError(f"sweep.{unknown[0]} is no option of sweep: it takes on_failure.")
    if value not in ("stop", "continue"):
        raise UserError(f"sweep.on_failure={value} does not fit: write stop or continue.")
    return value


def figure_for_sweeper(results: Mapping[str, Any]) -> float | None:
    """What a sweeper optimises; see `figure_of`.

    Raises:
        UserError: a sweeper with a direction would look for the worst.
    """
    figure = figure_of(results)
    if _sweep is None or figure is None:
        return figure
    direction = _sweep.direction
    metric, right = ("mse", "minimize") if "validation_mse" in results else ("accuracy", "maximize")
    if direction in ("minimize", "maximize") and direction != right:
        raise UserError(
            f"hydra.sweeper.direction={direction} would look for the worst validation {metric}: "
            f"write hydra.sweeper.direction={right}."
        )
    return figure


def run_here(planned: PlannedRun) -> float | None:
    """Carry out a run in this world. Every rank calls it.

    In a sweep all ranks learn how the job ended, and have the figure that a sweeper optimises.

    Raises:
        Failed: it went wrong, here or on another rank, and no other job is to be run.
    """
    try:
        results = carry_out(planned)
        try:
            figure = figure_for_sweeper(results)
        except UserError as error:
            raise Failed(error, in_job=True) from None
    except Failed as failed:
        if planned.in_sweep and failed.in_job:
            return _failed_here(planned, failed)
        return failed_job(planned, failed)
    if not planned.in_sweep:
        return figure
    words = _endings({"failed": False, "figure": figure})
    if any(word["failed"] for word in words):
        if any(word["stops"] for word in words if word["failed"]):
            raise Failed(Elsewhere(), in_job=True)
        return _go_on(planned)
    current_job().end()
    return words[0]["figure"]


def _failed_here(planned: PlannedRun, failed: Failed) -> None:
    stops = _stops(planned, failed.error)
    word = {"failed": True, "stops": stops}
    if stops:
        key = f"ending/{get_rank()}"
        with contextlib.suppress(RuntimeError):
            current_job().store.set(key, json.dumps(word))  # nobody is waited for
        return failed_job(planned, failed)
    failed_job(planned, failed)
    _endings(word)
    return _go_on(planned)


def _endings(word: dict[str, Any]) -> list[dict[str, Any]]:
    """Every rank's word on how the job ended. A rank that died is found by the job's pulse."""
    if get_world_size() == 1:
        return [word]
    try:
        return exchange(current_job().store, "ending", word, timeout=None)
    except Exception as error:
        raise Failed(error, in_job=True) from error


def _go_on(planned: PlannedRun) -> None:
    current_job().end()
    _count_failed(planned)


def _count_failed(planned: PlannedRun) -> None:
    if _sweep is not None and planned.number not in _sweep.failed:
        _sweep.failed.append(planned.number)


def failed_job(planned: PlannedRun, failed: Failed) -> None:
    """Note that a run failed. It returns where the sweep's other jobs are to be run.

    Raises:
        Failed: nothing else is to be run.
        JobFailed: the same, in a process that was started for this job.
    """
    error = failed.error
    if not planned.in_sweep or _interrupted(error):
        raise failed
    sentence, status = sentence_of(error, failed.in_job)
    sentence = pop_worker_error(planned.directory) or sentence
    noted = isinstance(error, Elsewhere) and not str(error)  # by the rank that it came from
    if get_rank() == 0 and not noted:
        write_failure(planned.directory, planned.overrides, sentence, status)
    if _stops(planned, error):
        if _sweep is None:
            raise JobFailed(planned.number, sentence, status) from None
        raise failed
    say_and_go_on(error, failed.in_job, f"job {planned.number} of the sweep failed; going on")
    _count_failed(planned)


def _interrupted(error: Exception) -> bool:
    by_signal = isinstance(error, WorldEnded) and error.exit_status in (130, 143)
    return by_signal or isinstance(error, Interrupted)


def _stops(planned: PlannedRun, error: Exception) -> bool:
    try:
        return _interrupted(error) or on_failure_of(planned.configuration) == "stop"
    except UserError:
        return True


@contextmanager
def last_jobs_awaited() -> Iterator[None]:
    """At the context's end, the worlds of a sweep's last jobs are waited for, or, when something
    went wrong, ended.
    """
    try:
        yield
        if _sweep is not None:
            _sweep.worlds.settle()
    finally:
        if _sweep is not None:
            _sweep.worlds.stop()


def end_sweep(status: int) -> int:
    """After a sweep, write its tables and say which runs failed. Every rank calls it at its end.

    Args:
        status: the exit status so far.

    Returns:
        The exit status: 1 if it was 0 and a job failed.
    """
    if _sweep is None:
        return status
    store, key = world_store(), f"metadist/sweep reported/{attempt()}"
    if get_rank() == 0:
        status = _report(_sweep, status)
        with contextlib.suppress(RuntimeError):
            store.set(key, "yes")
        return status
    status = status or int(bool(_sweep.failed))
    deadline = time.monotonic() + _REPORT_SECONDS
    with contextlib.suppress(RuntimeError):
        # torchrun ends all ranks as soon as one has failed: rank zero is to be the first.
        while status and not store.check([key]) and time.monotonic() < deadline:
            time.sleep(0.05)
    return status


def _report(sweep: Sweep, status: int) -> int:
    folder = sweep.directory
    try:
        report = write_sweep_report(folder)
    except UserError as error:
        if not status:
            speak(f"error: {error}")
        return status or USER_ERROR_STATUS
    print("\n".join(report.summary_lines()), flush=True)
    if status in (130, 143):
        speak(f"the sweep was stopped: to go on, give the same command hydra.sweep.dir={folder}")
    if report.failed and not status:
        many = f"{len(report.failed)} job{'s' if len(report.failed) > 1 else ''}"
        speak(
            f"error: {many} of the sweep failed ({', '.join(report.failed)}): sweep.md says why; "
            f"the same command with hydra.sweep.dir={folder} runs them again."
        )
    return status or int(bool(report.failed or sweep.failed))
