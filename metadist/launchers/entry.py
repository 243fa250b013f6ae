"""The way in for every experiment: Hydra around a world, and the exit status."""

import functools
import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import hydra

from metadist.distributed import get_rank
from metadist.errors import UserError
from metadist.launchers.carry_out import Failed
from metadist.launchers.error_reporting import exit_process, report_error, wants_traceback
from metadist.launchers.set_up import Build
from metadist.launchers.sweeps import JobFailed, end_sweep, last_jobs_awaited
from metadist.launchers.task_function import TaskFunction
from metadist.training import Interrupted


def experiment(script: str, build: Build) -> Callable[[], None]:
    """The main function of an experiment's script.

    It composes `conf/NAME.yaml`, for a script `experiments/NAME.py`, with the command line
    through Hydra, builds the experiment on every rank, and runs it. All ranks share one run
    directory, into which rank zero alone writes. An error of the user's is one sentence on rank
    zero and exit status 2.

    Args:
        script: the script's `__file__`; `conf/` lies beside its folder.
        build: (configuration, run directory, name) -> the experiment.
    """
    path = Path(script).resolve()
    main = hydra.main(
        version_base="1.3", config_path=str(path.parent.parent / "conf"), config_name=path.stem
    )(TaskFunction(path, build))

    @functools.wraps(main)
    def guarded() -> None:
        exit_process(_exit_status(main), _is_program(path))

    return guarded


def _is_program(path: Path) -> bool:
    """Whether this process was started to run a script, and not another program that calls it."""
    started = getattr(sys.modules["__main__"], "__file__", None)
    return started is not None and Path(started).resolve() == path


def _exit_status(main: Callable[[], None]) -> int:
    """Run, and say what went wrong, if anything did, as far as it is this rank's to say."""
    traceback = wants_traceback()
    if get_rank() != 0:
        logging.disable(logging.INFO)
    status = 0
    try:
        with _signals_stop_at_once(), last_jobs_awaited():
            main()
    except Failed as failed:
        status = report_error(failed.error, traceback, failed.in_job)
    except JobFailed as failed:
        report_error(UserError(str(failed)), traceback, in_job=False)
        status = failed.exit_status
    except Exception as error:
        status = report_error(error, traceback, in_job=False)
    return end_sweep(status)


@contextmanager
def _signals_stop_at_once() -> Iterator[None]:
    """SIGINT and SIGTERM raise `Interrupted` where nothing else has been made of them: as long
    as a run has not begun there is nothing to save.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise Interrupted(number, "stopped outside of training: nothing new to save")

    numbers = (signal.SIGINT, signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, stop) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
