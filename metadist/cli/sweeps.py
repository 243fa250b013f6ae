"""The jobs of a sweep (`-m`): agree on all ranks how a job ended, and report at the end."""

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from metadist.config.instantiate import locate_target
from metadist.deadlines import wait_until
from metadist.distributed import get_rank, get_world_size
from metadist.distributed.job import current_job
from metadist.distributed.process_exit import all_closed
from metadist.distributed.rendezvous import all_gather_object, report_object
from metadist.distributed.store import world_store
from metadist.distributed.world import restart_count
from metadist.errors import FAILURE_STATUS, SIGNAL_STATUSES, USER_ERROR_STATUS, UserError
from metadist.launchers.error_reporting import (
    RemoteRankFailed,
    WorkerGroupFailed,
    error_summary,
    print_error,
    report_error_and_continue,
)
from metadist.launchers.job import JobFailure, SweepJobFailed, attempt_job
from metadist.launchers.launcher import Launcher
from metadist.launchers.pool import JobExit, JobPool
from metadist.launchers.run_spec import RunSpec, finished_results, results_summary
from metadist.loggers.console import print_plain
from metadist.metrics import counted, larger_is_better, task_metric
from metadist.reports import (
    RESULTS_FILE,
    directory_override,
    pop_worker_error,
    read_results,
    write_failure,
)
from metadist.training import Interrupted

_REPORT_SECONDS = 30.0
"""Timeout of the other ranks of a failed sweep, which wait for rank zero to write its report."""


_OUTCOME = "job outcome"


class _JobOutcome(NamedTuple):
    """How a job of a sweep ended on a rank.

    Attributes:
        failed: whether this rank raised an error.
        stops: whether the error ends the sweep.
        closed: whether the rank has left the job's RPC or process group.
        value: the value that a sweeper optimizes.
        stop_signal: the signal that asked a job to stop when it had nearly finished; 0 for none.
    """

    failed: bool = False
    stops: bool = False
    closed: bool = True
    value: float | None = None
    stop_signal: int = 0


@dataclass
class Sweep:
    """The sweep whose sweeper runs in this process.

    Attributes:
        directory: the directory of the sweep; its jobs are in DIR/0, DIR/1, …
        direction: "minimize" or "maximize" if the sweeper optimizes, else "".
        starts_all: whether sweeper and launcher start all jobs without reading their results, as
            Hydra's basic ones do.
        failed: the numbers of the jobs that failed in this process.
        pool: the launched jobs.
    """

    directory: Path
    direction: str
    starts_all: bool
    failed: set[int] = field(default_factory=set)
    pool: JobPool = field(default_factory=JobPool)


_sweep: Sweep | None = None
"""The sweep; None without `-m` and in a process that joblib or submitit started for a job."""


class SweepCallback(Callback):
    """Hydra callback that records the start of a sweep."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """See Hydra's `Callback`."""
        global _sweep
        _check_run_directory(config)
        sweeper, launcher = config.hydra.sweeper, config.hydra.launcher
        names = [str(node.get("_target_")).rpartition(".")[2] for node in (sweeper, launcher)]
        _sweep = Sweep(
            directory=Path(str(config.hydra.sweep.dir)).resolve(),
            direction=str(sweeper.get("direction", "")).rpartition(".")[2].lower(),
            starts_all=names == ["BasicSweeper", "BasicLauncher"],
        )
        try:
            _check_direction(_sweep.direction, _is_regression(config))
        except UserError as error:  # Hydra would only warn of an Exception
            raise JobFailure(error, in_job=False) from None


def _check_run_directory(config: DictConfig) -> None:
    """Raise `JobFailure` if the command line sets `hydra.run.dir`, which Hydra ignores."""
    overrides = OverridesParser.create().parse_overrides(list(config.hydra.overrides.hydra))
    if any(override.key_or_group == "hydra.run.dir" for override in overrides):
        message = (
            "hydra.run.dir has no effect in a sweep: give hydra.sweep.dir=DIR, whose jobs are "
            "DIR/0, DIR/1, …."
        )
        raise JobFailure(UserError(message), in_job=False)


def _is_regression(config: DictConfig) -> bool | None:
    """Whether the sweep's dataset has regression tasks; None if it is swept over or missing."""
    parser = OverridesParser.create()
    overrides = parser.parse_overrides(list(config.hydra.overrides.task))
    swept = {override.key_or_group for override in overrides if override.is_sweep_override()}
    swept |= set(config.hydra.sweeper.get("params") or ())
    target = OmegaConf.select(config, "dataset._target_")
    if target is None or not swept.isdisjoint(("dataset", "dataset._target_")):
        return None
    return getattr(locate_target(str(target), "dataset"), "regression", None)


def _check_direction(direction: str, regression: bool | None) -> None:
    """Raise `UserError` if the sweeper is known to optimize in the wrong direction."""
    if regression is None:
        return
    metric = task_metric(regression)
    expected = "maximize" if larger_is_better(metric) else "minimize"
    if direction in ("minimize", "maximize") and direction != expected:
        raise UserError(
            f"hydra.sweeper.direction={direction} would look for the worst validation {metric}: "
            f"write hydra.sweeper.direction={expected}."
        )


def objective_value(results: Mapping[str, Any]) -> float | None:
    """The value that a sweeper optimizes: the validation metric of the tested state.

    It is the accuracy (0 to 1, `hydra.sweeper.direction=maximize`) or, for regression, the mean
    squared error (`minimize`); never a test metric. It is None on ranks without the training loop
    and without validation (`trainer.eval_every=0`).

    Raises:
        UserError: the sweeper optimizes in the wrong direction.
    """
    value = results.get("validation_accuracy", results.get("validation_mse"))
    if value is None:
        return None
    if _sweep is not None:
        _check_direction(_sweep.direction, "validation_accuracy" not in results)
    return float(value)


def launch_job(launcher: Launcher, max_concurrent: int, spec: RunSpec) -> float | None:
    """Run a job with a launcher. The launching process calls it.

    Hydra's basic sweeper and launcher do not read the return value of a job, so several of their
    jobs run at the same time, and `sweep_jobs` waits for the last one. With any other sweeper, this
    function waits for the job.

    Args:
        launcher: the launcher, which starts the job's processes.
        max_concurrent: the number of jobs that may run at the same time.
        spec: the job.

    Returns:
        The value that a sweeper optimizes; None if the function does not wait for the job.

    Raises:
        JobFailure: the job or an earlier one failed.
    """
    try:
        results = finished_results(spec) if spec.in_sweep else None
        value = None if results is None else objective_value(results)
    except Exception as error:
        fail_job(spec, JobFailure(error, in_job=False))
        return None
    if results is not None:
        print_plain(f"job {spec.number} had finished before: {results_summary(results)}")
        return value
    starts_all = _sweep is not None and _sweep.starts_all
    pool = _sweep.pool if _sweep is not None else JobPool()
    concurrent = max_concurrent > 1 and spec.in_sweep and (_sweep is None or starts_all)
    spec = replace(spec, concurrent=concurrent)
    pop_worker_error(spec.directory)  # of an earlier attempt
    pool.submit(
        partial(launcher.run, spec), launcher.stop, max_concurrent, partial(_finish_launched, spec)
    )
    return None if starts_all else pool.join()[0]


def _finish_launched(spec: RunSpec, job_exit: JobExit) -> float | None:
    """The objective value of a launched job that has ended.

    Raises:
        JobFailure: the job failed or could not be started.
    """
    if job_exit != 0:
        error = job_exit if isinstance(job_exit, Exception) else WorkerGroupFailed(job_exit)
        fail_job(spec, JobFailure(error, in_job=False))
        return None
    try:
        results = read_results(spec.directory)
        if results is None:
            raise UserError(
                f"the run ended without an error but left no results in {spec.directory}: put "
                "hydra.run.dir or hydra.sweep.dir on a file system that all nodes share."
            )
        value = objective_value(results)
    except UserError as error:
        fail_job(spec, JobFailure(error, in_job=False))
        return None
    if spec.in_sweep:
        print_plain(f"job {spec.number} finished: {results_summary(results)}")
    return value


def run_sweep_job(spec: RunSpec) -> float | None:
    """Run a job of a sweep in this process. Every rank calls it.

    The ranks exchange how the job ended, and all return the value that a sweeper optimizes.

    Raises:
        JobFailure: the job failed, on this or another rank, and the sweep stops.
    """
    try:
        results = attempt_job(spec)
        try:
            value = objective_value(results)
        except UserError as error:
            raise JobFailure(error, in_job=True) from None
    except JobFailure as failure:
        if not failure.in_job:
            fail_job(spec, failure)
            return None
        outcome = _JobOutcome(
            failed=True, stops=_stops_sweep(spec, failure.error), closed=all_closed()
        )
        if outcome.stops:
            with contextlib.suppress(RuntimeError):  # the other ranks are not waited for
                report_object(current_job().store, _OUTCOME, outcome)
        fail_job(spec, failure)
        _require_closed(_exchange_outcomes(outcome), spec)
        current_job().end()
        return None
    stop_signal = current_job().stop_signal
    outcomes = _exchange_outcomes(_JobOutcome(value=value, stop_signal=stop_signal))
    if any(outcome.stops for outcome in outcomes):
        raise JobFailure(RemoteRankFailed(), in_job=True)
    _require_closed(outcomes, spec)
    current_job().end()
    if number := max(outcome.stop_signal for outcome in outcomes):
        stopped = Interrupted(number, f"stopped after job {spec.number} of the sweep had finished")
        raise JobFailure(stopped, in_job=True)
    if any(outcome.failed for outcome in outcomes):
        _count_failed(spec)
        return None
    return outcomes[0].value


def _exchange_outcomes(outcome: _JobOutcome) -> list[_JobOutcome]:
    """The job's outcome on each rank. The heartbeat detects ranks that died."""
    if get_world_size() == 1:
        return [outcome]
    try:
        outcomes = all_gather_object(current_job().store, _OUTCOME, outcome, timeout=None)
        return [_JobOutcome(*values) for values in outcomes]
    except Exception as error:
        raise JobFailure(error, in_job=True) from error


def _require_closed(outcomes: list[_JobOutcome], spec: RunSpec) -> None:
    """Require that all ranks have closed the failed job's RPC or process group.

    Raises:
        JobFailure: a rank has not, so it cannot run another job. Raised on all ranks.
    """
    if not all(outcome.closed for outcome in outcomes):
        raise JobFailure(UserError(_stuck_sentence(spec)), in_job=True)


def _stuck_sentence(spec: RunSpec) -> str:
    return (
        f"the sweep ends, because a rank has not left job {spec.number}: start it again with "
        f"{directory_override('hydra.sweep.dir', spec.directory.parent)} to run the other jobs."
    )


def fail_job(spec: RunSpec, failure: JobFailure) -> None:
    """Record that a job failed. Returns if the other jobs of a sweep are to run.

    Raises:
        JobFailure: no other job is to run.
        SweepJobFailed: the same, in a process that a Hydra launcher started for this job.
    """
    error = failure.error
    if not spec.in_sweep or _is_interrupted(error):
        raise failure
    message, status = error_summary(error, failure.in_job)
    message = pop_worker_error(spec.directory) or message
    reported = isinstance(error, RemoteRankFailed) and not str(error)  # by the rank that failed
    if get_rank() == 0 and not reported:
        write_failure(spec.directory, spec.overrides, message, status)
    _count_failed(spec)
    # Without a record in the job's directory, only an error tells the sweep's process of the
    # failure. Hydra raises it there after the jobs that joblib or submitit started together.
    unrecorded = _sweep is None and (spec.directory / RESULTS_FILE).exists()
    if unrecorded or _stops_sweep(spec, error):
        if _sweep is None:
            raise SweepJobFailed(spec.number, message, status) from None
        raise failure
    report_error_and_continue(
        error,
        failure.in_job,
        f"job {spec.number} of the sweep failed; going on",
        _stuck_sentence(spec),
    )


def _count_failed(spec: RunSpec) -> None:
    if _sweep is not None:
        _sweep.failed.add(spec.number)


def _is_interrupted(error: Exception | Interrupted) -> bool:
    by_signal = isinstance(error, WorkerGroupFailed) and error.exit_status in SIGNAL_STATUSES
    return by_signal or isinstance(error, Interrupted)


def _stops_sweep(spec: RunSpec, error: Exception | Interrupted) -> bool:
    try:
        return _is_interrupted(error) or spec.settings.sweep.on_failure == "stop"
    except Exception:
        return True


@contextmanager
def sweep_jobs() -> Iterator[None]:
    """At the end of the context, wait for the launched jobs; after an error, stop them."""
    try:
        yield
        if _sweep is not None:
            _sweep.pool.join()
    finally:
        if _sweep is not None:
            _sweep.pool.stop()


def finish_sweep(status: int) -> int:
    """After a sweep, write its report and print the failed jobs. Every rank calls it.

    Args:
        status: the exit status so far.

    Returns:
        The exit status: 1 if it was 0 and a job failed. Without a sweep it is unchanged.
    """
    if _sweep is None:
        return status
    # The count of restarts may differ between nodes.
    store, key = world_store(), f"metadist/sweep reported/{current_job().key or restart_count()}"
    if get_rank() == 0:
        status = _report(_sweep, status)
        with contextlib.suppress(RuntimeError):
            store.set(key, "yes")
        return status
    status = status or int(bool(_sweep.failed))
    if status:  # torchrun stops all ranks when the first one fails, so rank zero must exit first
        with contextlib.suppress(RuntimeError):
            wait_until(lambda: store.check([key]), _REPORT_SECONDS)
    return status


def _report(sweep: Sweep, status: int) -> int:
    folder, again = sweep.directory, directory_override("hydra.sweep.dir", sweep.directory)
    stopped = f"the sweep was stopped: to resume, give the same command with {again}"
    try:
        from metadist.reports.sweep_report import write_sweep_report

        report = write_sweep_report(folder)
        print_plain("\n".join(report.summary_lines()))
    except UserError as error:
        if status in SIGNAL_STATUSES:  # before a job had left a file
            print_error(stopped)
        elif not status:
            print_error(f"error: {error}")
        return status or (FAILURE_STATUS if sweep.failed else USER_ERROR_STATUS)
    if status in SIGNAL_STATUSES:
        print_error(stopped)
    elif status and (names := [str(number) for number in sorted(sweep.failed)] or report.failed):
        # Failed jobs in the directory may be those of an earlier command, and a job that was
        # refused because its directory has the results of another run is not among them.
        job, it = ("job", "it") if len(names) == 1 else ("jobs", "them")
        print_error(
            f"the sweep ended with the failed {job} ({', '.join(names)}): after a correction, the "
            f"same command with {again} runs {it} again and goes on with the other jobs."
        )
    elif report.failed:
        jobs = counted(len(report.failed), "job")
        print_error(
            f"error: {jobs} of the sweep failed ({', '.join(report.failed)}): sweep.md says why; "
            f"the same command with {again} runs them again."
        )
    elif sweep.failed:
        jobs, numbers = counted(len(sweep.failed), "job"), map(str, sorted(sweep.failed))
        print_error(
            f"error: {jobs} of the sweep failed ({', '.join(numbers)}) in directories "
            "with the results of a run, which are kept: the errors above say why."
        )
    return status or int(bool(report.failed or sweep.failed))
