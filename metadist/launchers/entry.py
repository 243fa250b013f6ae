"""The way in for every experiment: Hydra around a world, errors said once, the exit status."""

import contextlib
import datetime
import functools
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from metadist.configuration.wording import explain
from metadist.distributed import PeerLost, get_rank
from metadist.distributed.meeting import exchange, meet, world_store
from metadist.distributed.world import attempt
from metadist.errors import UserError
from metadist.training import Experiment, Interrupted, run

USER_ERROR_STATUS = 2
"""Exit status after an error that the user can mend."""

FAILURE_STATUS = 1
"""Exit status after any other error."""

_SET_UP_SECONDS = 1800.0

Build = Callable[[DictConfig, Path, str], Experiment]


class _JobFailed(BaseException):
    """Carries a job's exception past Hydra, which would print it on every rank.

    Attributes:
        error: the exception.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class _Elsewhere(Exception):
    """Another rank failed in setting up, and says why."""


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
    _register_resolvers()
    path = Path(script).resolve()
    config_name = path.stem

    def job(configuration: DictConfig) -> Any:
        directory = Path(HydraConfig.get().runtime.output_dir).resolve()
        try:
            return run(_build_on_all_ranks(build, configuration, directory, config_name))
        except Exception as error:
            raise _JobFailed(error) from error

    main = hydra.main(
        version_base="1.3", config_path=str(path.parent.parent / "conf"), config_name=config_name
    )(job)

    @functools.wraps(main)
    def guarded() -> None:
        sys.exit(_exit_status(main))

    return guarded


def _exit_status(main: Callable[[], None]) -> int:
    """Run, and say what went wrong, if anything did, as far as it is this rank's to say."""
    # Hydra then raises what went wrong instead of printing it on every rank.
    wants_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"
    if get_rank() != 0:
        logging.disable(logging.INFO)
    try:
        main()
    except _JobFailed as failed:
        return _say(failed.error, wants_traceback, in_job=True)
    except Exception as error:
        return _say(error, wants_traceback, in_job=False)
    return 0


def _say(error: Exception, wants_traceback: bool, in_job: bool) -> int:
    """Say what went wrong as far as it is this rank's to say; the exit status for it.

    An OSError before the job comes from Hydra, which could not make the run's directory.
    """
    if isinstance(error, _Elsewhere):
        _say_once("")
        return FAILURE_STATUS
    if isinstance(error, Interrupted):
        _say_once(str(error))
        return error.exit_status
    if isinstance(error, PeerLost):
        return _peer_lost(error)
    if isinstance(error, UserError | HydraException | OmegaConfBaseException) or (
        isinstance(error, OSError) and not in_job
    ):
        if wants_traceback:
            traceback.print_exception(error)
        _say_once(f"error: {explain(error)}")
        return USER_ERROR_STATUS
    sys.stdout.flush()
    print(f"error: rank {get_rank()} failed:", file=sys.stderr)
    traceback.print_exception(error)
    sys.stderr.flush()
    with contextlib.suppress(Exception):
        world_store().set(_said_key(), "yes")
    return FAILURE_STATUS


def _build_on_all_ranks(
    build: Build, configuration: DictConfig, directory: Path, name: str
) -> Experiment:
    """Build on every rank; when one cannot, all of them know why before any goes on."""
    store = meet("set-up", _SET_UP_SECONDS)
    error: Exception | None = None
    built: Experiment | None = None
    try:
        built = build(configuration, directory, name)
    except Exception as any_error:
        error = any_error
    outcome = {
        "sentence": str(error) if isinstance(error, UserError) else "",
        "failed": error is not None,
        "iteration": built.progress.iteration if built and built.strategy.runs_loop() else None,
    }
    texts = exchange(store, "outcome", json.dumps(outcome), _SET_UP_SECONDS)
    outcomes = [json.loads(text) for text in texts]
    for rank, each in enumerate(outcomes):
        if each["sentence"]:
            first = outcomes[0]["sentence"]
            raise UserError(each["sentence"] if first else f"on rank {rank}: {each['sentence']}")
    if error is not None:
        raise error
    if any(each["failed"] for each in outcomes):
        raise _Elsewhere
    iterations = {each["iteration"] for each in outcomes} - {None}
    if len(iterations) > 1:
        raise UserError(
            f"the ranks found checkpoints of different iterations, {sorted(iterations)}: put "
            "hydra.run.dir on a file system that all nodes share."
        )
    assert built is not None
    return built


def _say_once(sentence: str) -> None:
    """Rank zero prints the sentence; the others wait until it has, for torchrun ends all ranks
    as soon as the first of them has ended.
    """
    if get_rank() == 0:
        sys.stdout.flush()
        if sentence:
            print(sentence, file=sys.stderr, flush=True)
    with contextlib.suppress(Exception):
        key, store = _said_key(), world_store()
        if get_rank() == 0:
            store.set(key, "yes")
        else:
            deadline = time.monotonic() + 5.0
            while not store.check([key]):
                if time.monotonic() > deadline:
                    print(f"{sentence} (rank {get_rank()})", file=sys.stderr, flush=True)
                    break
                time.sleep(0.02)


def _peer_lost(error: PeerLost) -> int:
    """A rank that lost another one speaks only if the lost one has not said why it went."""
    time.sleep(0.5)
    said = False
    with contextlib.suppress(Exception):
        said = world_store().check([_said_key()])
    if not said:
        print(f"error: rank {get_rank()}: {error}", file=sys.stderr, flush=True)
    return FAILURE_STATUS


def _said_key() -> str:
    """Where a rank notes that it has told the user what ended this attempt."""
    return f"metadist/said/{attempt()}"


def _register_resolvers() -> None:
    """What `conf/` needs so that all ranks agree on one directory that rank zero writes."""
    OmegaConf.register_new_resolver("run_stamp", _run_stamp, use_cache=True, replace=True)
    OmegaConf.register_new_resolver(
        "on_rank_zero", lambda value: value if get_rank() == 0 else None, replace=True
    )


def _run_stamp() -> str:
    """The date and time at which rank zero started, the same on every rank and after restarts."""
    now = datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    store = world_store()
    if get_rank() == 0:
        return store.compare_set("metadist/run_stamp", "", now).decode()
    return store.get("metadist/run_stamp").decode()
