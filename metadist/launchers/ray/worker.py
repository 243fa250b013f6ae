"""What a Ray worker does for a run: the same as a process that torchrun has started."""

import contextlib
import logging
import os
import pickle
import sys
import threading
import time
from dataclasses import dataclass, replace
from typing import Any

from metadist.distributed import WorkerLostError, get_rank
from metadist.distributed.job import current_job
from metadist.distributed.world import restart_count
from metadist.launchers.error_reporting import error_summary, report_error
from metadist.launchers.job import JobFailure, RunSpec, run_job
from metadist.launchers.ray.board import Board, Voice
from metadist.reports import WORKER_ERROR_FILE
from metadist.training import Experiment, Interrupted

BEGUN, ENDED, REPORTED, SIGNAL = "begun", "ended", "reported", "signal"
"""Topics of the board: ranks that have begun; (rank, exit status) of a rank that is done; figures
that Ray Train has got; a signal for the run.
"""

_SIGNAL_SECONDS = 10.0
_END_SECONDS = 3.0


class WorkerLost(Exception):
    """The run lost a worker: Ray is to start it again, if it may."""


@dataclass(frozen=True)
class Errand:
    """What a worker gets to do.

    Attributes:
        planned: the run, pickled: it may need the modules below.
        board: for what the worker says and is told.
        directory: where the command was given.
        modules: where Python looks for modules there.
        tracebacks: whether those of the user's errors were asked for there.
    """

    planned: bytes
    board: Board
    directory: str
    modules: tuple[str, ...]
    tracebacks: bool = False


def work(config: dict[str, Any]) -> None:
    """The training function of a TorchTrainer, on every worker: do the pickled `config["errand"]`.

    It returns when the run is over, also when it ended with an error that another attempt would
    meet again; the board then has the exit status.

    Raises:
        WorkerLost: a worker died, froze or cannot be reached.
    """
    errand: Errand = pickle.loads(config["errand"])
    board = errand.board
    if _failed(board) or board.read(SIGNAL):  # the last attempt's end was no matter of luck
        return
    board.post(BEGUN, get_rank())
    with contextlib.suppress(OSError):
        os.chdir(errand.directory)
    sys.path += [path for path in errand.modules if path not in sys.path]
    with Voice(board):
        _set_up_logging()
        threading.Thread(target=_heed_signals, args=[board], daemon=True).start()
        if restart_count() and get_rank() == 0:
            print(
                f"a worker was lost: attempt {restart_count() + 1} of the run",
                file=sys.stderr,
            )
        try:
            status = _carry_out(errand)
        except JobFailure as failed:
            status = report_error(failed.error, errand.tracebacks, failed.in_job)
            if isinstance(failed.error, WorkerLostError) and not _failed_elsewhere(board):
                raise WorkerLost(str(failed.error)) from None
            _leave_last_words(errand, failed)
        except Exception as error:
            status = report_error(error, errand.tracebacks, in_job=True)
    board.post(ENDED, (get_rank(), status))


def _carry_out(errand: Errand) -> int:
    from metadist.launchers.ray.reports import Reports, bring_checkpoint

    planned: RunSpec = pickle.loads(errand.planned)
    planned = replace(planned, in_sweep=False)  # that it is to be run is settled
    if restart_count() or planned.configuration.get("resume") == "auto":
        bring_checkpoint(planned.directory)
    reports = Reports(planned.directory, errand.board)

    def start_reports(experiment: Experiment) -> None:
        reports.start()  # not before: a run that resumes sets aside what came later

    run_job(planned, on_built=start_reports)
    reports.finish()
    return 0


def _leave_last_words(errand: Errand, failed: JobFailure) -> None:
    """For the record of a sweep's job: what was said, by the rank that said it.

    A run that was asked to stop has not failed: nobody would fetch its words, and they would be
    taken for those of a later failure.
    """
    if isinstance(failed.error, Interrupted):
        return
    planned: RunSpec = pickle.loads(errand.planned)
    spoke = current_job().owns_first_failure if failed.in_job else get_rank() == 0
    if planned.in_sweep and spoke:
        sentence, _ = error_summary(failed.error, failed.in_job)
        with contextlib.suppress(OSError):
            (planned.directory / WORKER_ERROR_FILE).write_text(sentence, encoding="utf-8")


def _failed(board: Board) -> bool:
    """Whether a rank has ended with an error that another attempt would meet again."""
    return any(status for _, status in board.read(ENDED))


def _failed_elsewhere(board: Board) -> bool:
    """The same of another rank, which may be about to say so: it has named the cause."""
    deadline = time.monotonic() + (0.0 if current_job().owns_first_failure else _END_SECONDS)
    while not (failed := _failed(board)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return failed


def _heed_signals(board: Board) -> None:
    """Pass a signal that the starting process got on to the run, once there is one."""
    while True:
        for number in board.read(SIGNAL, seconds=_SIGNAL_SECONDS):
            while True:  # a job may begin later
                current_job().request_stop(number)
                time.sleep(0.5)


def _set_up_logging() -> None:
    """As under torchrun: what the program notes goes to rank zero's standard output."""
    # Ray Train notes every report, under a name of no hierarchy.
    logging.getLogger().setLevel(logging.WARNING)
    logger = logging.getLogger("metadist")
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("[%(asctime)s][%(levelname)s] - %(message)s"))
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(logging.INFO if get_rank() == 0 else logging.WARNING)
