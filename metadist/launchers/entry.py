"""The way in for every experiment: Hydra around a world, and the exit status."""

import functools
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from metadist.distributed import get_rank
from metadist.distributed.job import begin_job
from metadist.launchers.resolvers import register_resolvers
from metadist.launchers.set_up import Build, build_on_all_ranks, timeout_of
from metadist.launchers.speaking import end_process, leave, say
from metadist.training import Interrupted, run


class _Failed(BaseException):
    """Carries an exception past Hydra, which would print it on every rank.

    Attributes:
        error: the exception.
        in_job: whether the ranks had met for the job already.
    """

    def __init__(self, error: Exception, in_job: bool) -> None:
        super().__init__(str(error))
        self.error = error
        self.in_job = in_job


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
    register_resolvers()
    path = Path(script).resolve()
    config_name = path.stem

    def work(configuration: DictConfig) -> Any:
        directory = Path(HydraConfig.get().runtime.output_dir).resolve()
        # As typed: a list would resolve the interpolations in them.
        task = HydraConfig.get().overrides.task
        overrides: list[str] = OmegaConf.to_container(task, resolve=False)
        in_job = False
        try:
            job = begin_job(timeout_of(configuration), end_process)
            in_job = True
            results = run(
                build_on_all_ranks(job, build, configuration, directory, config_name, overrides)
            )
        except Exception as error:
            raise _Failed(error, in_job) from error
        job.end()
        return results

    main = hydra.main(
        version_base="1.3", config_path=str(path.parent.parent / "conf"), config_name=config_name
    )(work)

    @functools.wraps(main)
    def guarded() -> None:
        status = _exit_status(main)
        leave(status) if status else sys.exit(0)

    return guarded


def _exit_status(main: Callable[[], None]) -> int:
    """Run, and say what went wrong, if anything did, as far as it is this rank's to say."""
    # Hydra then raises what went wrong instead of printing it on every rank.
    wants_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"
    if get_rank() != 0:
        logging.disable(logging.INFO)
    try:
        with _signals_stop_at_once():
            main()
    except _Failed as failed:
        return say(failed.error, wants_traceback, failed.in_job)
    except Exception as error:
        return say(error, wants_traceback, in_job=False)
    return 0


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
