"""The way in for every experiment: Hydra around a world, errors said once, the exit status."""

import contextlib
import datetime
import functools
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


def experiment(config_name: str, build: Build) -> Callable[[], None]:
    """The main function of an experiment's script.

    It composes `conf/CONFIG_NAME.yaml` with the command line through Hydra, builds the
    experiment on every rank, and runs it. All ranks share one run directory, into which rank
    zero alone writes. An error of the user's is one sentence on rank zero and exit status 2.

    Args:
        config_name: the configuration's file in `conf/`, without `.yaml`.
        build: (configuration, run directory, name) -> the experiment.
    """
    _register_resolvers()

    def job(configuration: DictConfig) -> Any:
        directory = Path(HydraConfig.get().runtime.output_dir).resolve()
        try:
            return run(_build_on_all_ranks(build, configuration, directory, config_name))
        except Exception as error:
            raise _JobFailed(error) from error

    main = hydra.main(
        version_base="1.3", config_path=str(_configuration_folder()), config_name=config_name
    )(job)

    @functools.wraps(main)
    def guarded() -> None:
        sys.exit(_exit_status(main))

    return guarded


def _configuration_folder() -> Path:
    return Path(sys.argv[0]).resolve().parent.parent / "conf"


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
        return _say(failed.error, wants_traceback)
    except Exception as error:
        return _say(error, wants_traceback)
    return 0


def _say(error: Exception, wants_traceback: bool) -> int:
    """Say what went wrong as far as it is this rank's to say; the exit status for it."""
    if isinstance(error, Interrupted):
        _say_once(str(error))
        return error.exit_status
    if isinstance(error, PeerLost):
        return _peer_lost(error)
    if isinstance(error, UserError | HydraException | OmegaConfBaseException | OSError):
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
    except UserError as user_error:
        error = user_error
    words = exchange(store, "error", "" if error is None else str(error), _SET_UP_SECONDS)
    for rank, word in enumerate(words):
        if word:
            raise UserError(word if words[0] else f"on rank {rank}: {word}")
    assert built is not None
    return built


def _say_once(sentence: str) -> None:
    """Rank zero prints the sentence; the others wait until it has, for torchrun ends all ranks
    as soon as the first of them has ended.
    """
    if get_rank() == 0:
        sys.stdout.flush()
        print(sentence, file=sys.stderr, flush=True)
    with contextlib.suppress(Exception):
        key, store = _said_key(), world_store()
        if get_rank() == 0:
            store.set(key, "yes")
        else:
            deadline = time.monotonic() + 5.0
            while not store.check([key]) and time.monotonic() < deadline:
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
