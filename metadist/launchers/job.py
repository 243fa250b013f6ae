"""Runs one job: rendezvous, build on all ranks, restore, train, test."""

import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from omegaconf import open_dict

from metadist.config.resolvers import run_stamp
from metadist.distributed import get_rank, get_world_size
from metadist.distributed.job import Job, begin_job, current_job
from metadist.distributed.rendezvous import all_gather_object
from metadist.errors import UserError
from metadist.files import locked_directory, replace_closed_streams
from metadist.launchers.building import build_on_all_ranks
from metadist.launchers.error_reporting import (
    abort_process,
    record_error_in,
    report_error,
    wants_traceback,
)
from metadist.launchers.run_spec import (
    RunSpec,
    begin_run_directory,
    finished_results,
    results_summary,
)
from metadist.loggers.console import print_plain
from metadist.reports import ENVIRONMENT_FILE, ERROR_FILE, write_json
from metadist.training import Experiment, Interrupted, Trainer
from metadist.training.checkpoints import Checkpoints
from metadist.training.environment import environment_of
from metadist.training.signals import REPEATED_SECONDS

_log = logging.getLogger(__name__)


class JobFailure(BaseException):
    """The error that ended a job.

    Not an `Exception`, so that Hydra neither prints it on every rank nor starts the next job of a
    sweep.

    Attributes:
        error: the error.
        in_job: whether the rendezvous had succeeded.
        directory: the run's directory, if it is to be removed where the report leaves it empty.
    """

    directory: Path | None = None

    def __init__(self, error: Exception | Interrupted, in_job: bool) -> None:
        super().__init__(str(error))
        self.error = error
        self.in_job = in_job


class SweepJobFailed(Exception):
    """A job of a sweep failed in the process of a Hydra launcher (joblib, submitit).

    It can be pickled. `exit_status` is the exit status of the job.
    """

    def __init__(self, number: int, message: str, exit_status: int) -> None:
        super().__init__(number, message, exit_status)
        self.number, self.message, self.exit_status = number, message, exit_status

    def __str__(self) -> str:
        return f"job {self.number}: {self.message}"


@dataclass
class ExitStatus:
    """The exit status of a process, set by `report_errors`."""

    value: int = 0


@contextmanager
def report_errors() -> Iterator[ExitStatus]:
    """Report errors of the block on the rank that must report them, and set the exit status.

    The block is all the work of a process, in its main thread. Until training installs its own
    handlers, SIGINT and SIGTERM raise `Interrupted`. Ranks other than zero do not log.
    """
    replace_closed_streams()
    tracebacks = wants_traceback()
    with suppress(UserError):  # invalid variables: the block raises the error
        if get_rank() != 0:
            logging.disable(logging.INFO)
    status = ExitStatus()
    try:
        with _signals_interrupt():
            yield status
    except JobFailure as failure:
        status.value = report_error(failure.error, tracebacks, failure.in_job)
        if failure.directory is not None:
            with suppress(OSError), locked_directory(failure.directory):  # of no other run
                failure.directory.rmdir()
    except SweepJobFailed as failure:
        report_error(UserError(str(failure)), tracebacks, in_job=False)
        status.value = failure.exit_status
    except (Exception, Interrupted) as error:
        status.value = report_error(error, tracebacks, in_job=False)


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    """Raise `Interrupted` in the block on SIGINT and SIGTERM.

    After an error the handlers stay, until `report_error` ignores the signals.
    """
    raised_at = -math.inf

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal raised_at
        if time.monotonic() - raised_at > REPEATED_SECONDS:
            raised_at = time.monotonic()
            raise Interrupted(number, "stopped outside of training: nothing new to save")

    numbers = (signal.SIGINT, signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.signal(number, interrupt) for number in numbers}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def run_job(spec: RunSpec, on_built: Callable[[Experiment], None] | None = None) -> dict[str, Any]:
    """Run a job from Python. See `attempt_job`; an error is raised as it is.

    After an error, too, this process has left the job and may go on with other work.

    Raises:
        UserError: the user can correct the error, such as a wrong option.
        Exception: any other error.
        Interrupted: a signal asked the run to stop; it has saved a checkpoint.
    """
    try:
        return attempt_job(spec, on_built)
    except JobFailure as failure:
        error = failure.error
    finally:
        current_job().end()
    raise error


def attempt_job(
    spec: RunSpec, on_built: Callable[[Experiment], None] | None = None
) -> dict[str, Any]:
    """Join the other ranks, build the experiment, restore its checkpoint, train and test it.

    Every rank calls it. It needs the environment variables of torchrun (RANK, WORLD_SIZE,
    LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT), or none of them in a single process.
    It does not need Hydra. A process may run several jobs one after the other.

    Args:
        spec: the job.
        on_built: a function called on every rank with the experiment before training starts.

    Returns:
        The results, as in `results.json`, on the ranks that run the training loop; {} on others. If
        a job of a sweep has finished before, its results are read and returned on all ranks.

    Raises:
        JobFailure: any error occurred; `report_errors` reports it.
    """
    in_job = False
    record_error_in(None)  # an earlier job's file remains if another rank reported the error
    try:
        settings = spec.settings
        if get_rank() == 0:  # a rank whose command gives no directory may wait for the default
            run_stamp(settings.rendezvous_timeout_seconds)
        job = begin_job(
            settings.timeout_seconds, abort_process, settings.rendezvous_timeout_seconds
        )
        in_job = True
        results = None
        if spec.in_sweep and not spec.launched:
            results = _finished_results_on_all_ranks(job, spec)
        if results is None:
            spec = _resumed_if_restarted(job, spec)
            with ExitStack() as locks:
                experiment = build_on_all_ranks(job, spec, locks)
                record_error_in(spec.directory / ERROR_FILE)
                if on_built is not None:
                    on_built(experiment)
                if get_rank() == 0:
                    begin_run_directory(spec)
                    write_json(spec.directory / ENVIRONMENT_FILE, environment_of(experiment))
                results = Trainer(experiment).run()
            record_error_in(None)
        elif get_rank() == 0:
            print_plain(f"job {spec.number} had finished before: {results_summary(results)}")
    except (Exception, Interrupted) as error:
        if spec.in_sweep and isinstance(error, Interrupted):
            error.args = (error.message,)  # the sweep prints how to resume it
        raise JobFailure(error, in_job) from error
    except SystemExit as error:
        if get_world_size() == 1:  # submitit exits so when SLURM preempts the job
            raise
        exit_error = RuntimeError(f"sys.exit({error.code!r}) was called during the job")
        raise JobFailure(exit_error.with_traceback(error.__traceback__), in_job) from error
    # In a sweep, the ranks first exchange the job's outcome.
    if spec.launched or not spec.in_sweep:
        job.end()
    return results


def _finished_results_on_all_ranks(job: Job, spec: RunSpec) -> dict[str, Any] | None:
    """Rank zero's `finished_results`, on all ranks.

    Raises:
        UserError: the ranks' jobs differ, or the results cannot be read. Raised on all ranks.
    """
    local_results, error_message = None, ""
    try:
        local_results = finished_results(spec) if get_rank() == 0 else None
    except UserError as error:
        error_message = str(error)
    report = {"overrides": spec.overrides, "results": local_results, "error": error_message}
    messages = all_gather_object(job.store, "finished", report, timeout=None)
    if messages[0]["error"]:
        raise UserError(messages[0]["error"])
    if any(message["overrides"] != messages[0]["overrides"] for message in messages):
        raise UserError(
            f"the {get_world_size()} ranks sampled different jobs, because each has a sweeper of "
            "its own: give the sweeper's sampler a seed (hydra.sweeper.sampler.seed=0), or start "
            "the sweep with python and launcher=torchrun instead of torchrun."
        )
    return messages[0]["results"]


def _resumed_if_restarted(job: Job, spec: RunSpec) -> RunSpec:
    """The job, which resumes from its newest checkpoint if torchrun has restarted the run.

    Rank zero decides: the restart counts of torchrun's agents differ, and do not include nodes that
    leave or join.
    """
    restarted = job.restarted or job.has_started(str(spec.directory))
    has_checkpoint = bool(Checkpoints(spec.directory).candidates())
    # The checkpoint that the user named is used until the run has written one.
    resumes = restarted and (has_checkpoint or spec.configuration.get("resume") is None)
    if not all_gather_object(job.store, "restarted", resumes, timeout=None)[0]:
        return spec
    configuration = spec.configuration.copy()
    with open_dict(configuration):
        configuration.resume = "auto"
    return replace(spec, configuration=configuration)
