"""Building an experiment on every rank, and agreeing on it before any work starts."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from omegaconf import DictConfig, open_dict

from metadist.config import drop_leftovers
from metadist.distributed import get_rank
from metadist.distributed.job import Job
from metadist.distributed.rendezvous import all_gather_object
from metadist.errors import UserError
from metadist.kernels import disable_native, native_available
from metadist.launchers.error_reporting import RemoteRankFailed
from metadist.training import Experiment
from metadist.training.checkpoints import has_checkpoints

_log = logging.getLogger(__name__)

Build = Callable[[DictConfig, Path, str], Experiment]


def timeout_of(configuration: DictConfig) -> float:
    """The configured `timeout_seconds`.

    Raises:
        UserError: it is no positive number.
    """
    value = configuration.get("timeout_seconds")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
        raise UserError(
            f"timeout_seconds={value} does not fit: it must be a number of seconds above 0."
        )
    return float(value)


def build_on_all_ranks(
    job: Job,
    build: Build,
    configuration: DictConfig,
    directory: Path,
    name: str,
    overrides: Sequence[str],
) -> Experiment:
    """Build on every rank; when one cannot, all of them know why before any goes on.

    A run that torchrun has restarted goes on from its newest checkpoint. Every rank calls it; a
    slow rank is waited for while its heartbeats arrive.

    Args:
        job: the ranks.
        build: (configuration, run directory, name) -> the experiment.
        configuration: as composed.
        directory: the run's.
        name: the experiment's.
        overrides: the words of the command line.

    Raises:
        UserError: on every rank, what one or all of them could not do.
        RemoteRankFailed: another rank failed, and tells.
    """
    if _restarted(job, configuration, directory):
        with open_dict(configuration):
            configuration.resume = "auto"
    error: Exception | None = None
    built: Experiment | None = None
    try:
        drop_leftovers(configuration, overrides)
        built = build(configuration, directory, name)
    except Exception as any_error:
        error = any_error
    word = {
        "sentence": str(error) if isinstance(error, UserError) else "",
        "failure": "" if error is None else f"{type(error).__name__}: {error}",
        "iteration": built.state.iteration if built and built.strategy.is_driver else None,
        "native": native_available(built.learner) if built else None,
    }
    words = all_gather_object(job.store, "outcome", word, timeout=None)
    for rank, each in enumerate(words):
        if each["sentence"]:
            first = words[0]["sentence"]
            raise UserError(each["sentence"] if first else f"on rank {rank}: {each['sentence']}")
    if error is not None:
        raise error
    for rank, each in enumerate(words):
        if each["failure"]:
            raise RemoteRankFailed(f"rank {rank} failed in setting up: {each['failure']}")
    iterations = {each["iteration"] for each in words} - {None}
    if len(iterations) > 1:
        raise UserError(
            f"the ranks found checkpoints of different iterations, {sorted(iterations)}: put "
            "hydra.run.dir on a file system that all nodes share."
        )
    assert built is not None
    without = [rank for rank, each in enumerate(words) if each["native"] is False]
    if without:
        disable_native(built.learner)  # it rounds otherwise than PyTorch
        if get_rank() == 0 and len(without) < len(words):
            _log.warning(
                "no C++ compiler serves on the machine of rank %s: no rank uses model.native",
                ", ".join(map(str, without)),
            )
    if get_rank() == 0:
        job.mark_started(str(directory))
    return built


def _restarted(job: Job, configuration: DictConfig, directory: Path) -> bool:
    """Whether this is a later attempt at the run, as rank zero sees it, that has something to go
    on from. Agents' restart counts differ, and a node that left or came does not count in them.
    """
    again = job.restarted or job.has_started(str(directory))
    saved = has_checkpoints(directory / "checkpoints")
    # A checkpoint that the user named comes first as long as the run has none of its own.
    mine = again and (saved or configuration.get("resume") is None)
    return all_gather_object(job.store, "restarted", mine, timeout=None)[0]
