"""Builds the experiment of a job on every rank, and requires that the ranks have built the same."""

import hashlib
import json
import logging
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from metadist import __version__
from metadist.config import build_experiment
from metadist.distributed import get_rank
from metadist.distributed.job import Job
from metadist.distributed.rendezvous import all_gather_object
from metadist.errors import UserError
from metadist.files import REDIRECT_RUN, locked_directory
from metadist.kernels import disable_native, native_available
from metadist.launchers.error_reporting import RemoteRankFailed, is_user_error, record_error_in
from metadist.launchers.run_spec import RunSpec, save_configuration
from metadist.loggers import flatten_values
from metadist.reports import CONFIG_FILE, ERROR_FILE, RESULTS_FILE
from metadist.training import Experiment, Interrupted, compile_step, resolve_device
from metadist.training.batching import ChunkSize
from metadist.training.partition_check import partition_digest

_log = logging.getLogger(__name__)

_MAY_DIFFER = (
    *("hydra", "launcher", "logger"),
    *("device", "resume", "threads", "trainer.task_chunk_size"),
)
"""Groups and keys whose values may differ between ranks."""


def build_on_all_ranks(job: Job, spec: RunSpec, locks: ExitStack) -> Experiment:
    """Build the experiment on every rank; if one rank fails, none of them continues.

    The ranks agree on kernels and chunk size, and then compile the outer step. A slow rank may take
    any time while its heartbeats arrive. On rank zero, the lock of the run's directory is added to
    `locks`.

    Raises:
        UserError: one or all ranks raised this error. Raised on all ranks.
        RemoteRankFailed: another rank failed and reports its error.
    """
    error: Exception | Interrupted | None = None
    try:
        if get_rank() == 0:
            _lock_directory(spec.directory, locks)
        experiment = build_experiment(spec.configuration, spec.directory, spec.name, spec.settings)
        partition = None
        if experiment.strategy.every_rank_drives:
            size = experiment.trainer_config.meta_batch_size
            partition = partition_digest(experiment.strategy, experiment.learner, size)
        device = resolve_device(experiment.train_mapper.device)
        values = _compared_values(experiment, spec.directory)
        outcome = _BuildOutcome(
            iteration=experiment.state.iteration if experiment.strategy.is_driver else None,
            native=native_available(experiment.learner, device),
            device=device.type,
            chunk_size=experiment.train_mapper.chunk_size,
            partition=partition,
            configuration=_digest(values),
        )
    except (Exception, Interrupted) as any_error:
        error = any_error
        outcome = _BuildOutcome(
            user_error=str(error) if isinstance(error, UserError) else "",
            error=f"{type(error).__name__}: {error}",
            refused=isinstance(error, Interrupted) or is_user_error(error, in_job=True),
        )
    gathered = all_gather_object(job.store, "built", outcome, timeout=None)
    outcomes = [_BuildOutcome(*fields) for fields in gathered]
    _require_built(outcomes, error, spec)
    if len({outcome.configuration for outcome in outcomes}) > 1:
        _refuse_different(all_gather_object(job.store, "values", values, timeout=None))
    check_same_device([outcome.device for outcome in outcomes], job.hosts)
    iterations = {outcome.iteration for outcome in outcomes if outcome.iteration is not None}
    if len(iterations) > 1:
        raise UserError(
            f"the ranks found checkpoints of different iterations, {sorted(iterations)}: put "
            "hydra.run.dir on a file system that all nodes share."
        )
    _require_equal_partition(experiment, outcomes)
    _use_equal_kernels(experiment, outcomes)
    compile_step(experiment, partial(all_gather_object, job.store, "compiled", timeout=None))
    if get_rank() == 0:
        job.mark_started(str(spec.directory))
    return experiment


def _lock_directory(directory: Path, locks: ExitStack) -> None:
    try:
        locks.enter_context(locked_directory(directory))
    except BlockingIOError:
        raise UserError(
            f"another run is writing to {directory}: wait until it has ended, or {REDIRECT_RUN}."
        ) from None
    except OSError:  # `restore` says why the directory cannot be written
        pass


class _BuildOutcome(NamedTuple):
    """The outcome of building the experiment on one rank: an error, or the other attributes.

    Attributes:
        user_error: the message of a `UserError`, "" for none.
        error: the class and message of any error, "" for none.
        refused: whether the error is one that the user can correct, or a signal.
        iteration: the restored iteration of a driver; None on other ranks.
        native: whether the native kernels are available; None if the model uses none.
        device: the type of the device.
        chunk_size: the number of tasks in a chunk.
        partition: a digest of the partitioner's shards; None if only rank zero calls it.
        configuration: a digest of the values that must be equal on all ranks.
    """

    user_error: str = ""
    error: str = ""
    refused: bool = False
    iteration: int | None = None
    native: bool | None = None
    device: str = ""
    chunk_size: ChunkSize | None = None
    partition: str | None = None
    configuration: str = ""


def _require_built(
    outcomes: list[_BuildOutcome], error: Exception | Interrupted | None, spec: RunSpec
) -> None:
    """Raise this rank's error, or an error that names the rank that failed."""
    for rank, outcome in enumerate(outcomes):
        if outcome.user_error:
            prefix = "" if outcomes[0].user_error else f"on rank {rank}: "
            raise UserError(f"{prefix}{outcome.user_error}") from error
    # A refused run leaves no files, and a finished one keeps its results.
    failed = [rank for rank, each in enumerate(outcomes) if each.error and not each.refused]
    if failed and not (spec.directory / RESULTS_FILE).exists():
        if get_rank() == 0 and not (spec.directory / CONFIG_FILE).exists():
            with suppress(OSError, UserError):  # the run ends with the first error
                save_configuration(spec)
        if get_rank() in failed:
            record_error_in(spec.directory / ERROR_FILE)
    if error is not None:
        raise error
    for rank, outcome in enumerate(outcomes):
        if outcome.error:
            raise RemoteRankFailed(f"rank {rank} failed while building: {outcome.error}")


def _compared_values(experiment: Experiment, directory: Path) -> dict[str, str]:
    """The values of the configuration, the data and the versions that must be equal on all ranks.

    Paths are left out, since nodes may have the data in different directories and mount a shared
    file system at different paths. Of the run's directory, the name is compared.
    """
    values = {
        key: str(value)
        for key, value in flatten_values(experiment.configuration).items()
        if {key, key.partition(".")[0]}.isdisjoint(_MAY_DIFFER) and "/" not in str(value)
    }
    return values | {
        "the checksum of the data": str(experiment.tasks.protocol().get("data_checksum", "")),
        "hydra.run.dir": directory.name,
        "the version of metadist": __version__,
        "the version of PyTorch": torch.__version__.partition("+")[0],
    }


def _digest(values: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _refuse_different(values: list[dict[str, str]]) -> None:
    """Raise an error that names a value that differs between ranks. Raised on all ranks.

    Args:
        values: the `_compared_values` of each rank.
    """
    for rank, other in enumerate(values):
        for key in sorted(values[0].keys() | other.keys()):
            first, second = values[0].get(key, "not set"), other.get(key, "not set")
            if first != second:
                raise UserError(
                    f"{key} is {second} on rank {rank} and {first} on rank 0: start all nodes with "
                    "the same command, files, data and versions."
                )


def _require_equal_partition(experiment: Experiment, outcomes: list[_BuildOutcome]) -> None:
    """Raise an error if the partitioner's shards differ between ranks."""
    partition = outcomes[0].partition
    ranks = [rank for rank, outcome in enumerate(outcomes) if outcome.partition != partition]
    if ranks:
        raise UserError(
            f"the partitioner gives different shards on ranks {ranks} and on rank 0, and with "
            f"strategy={experiment.strategy.name} every rank calls it: let the shards depend only "
            "on the tasks and the number of workers, not on hash() of strings or the order of "
            "sets, or take strategy=rpc."
        )


def _use_equal_kernels(experiment: Experiment, outcomes: list[_BuildOutcome]) -> None:
    """Use the same kernels and chunk size on all ranks: others round differently."""
    non_native_ranks = [rank for rank, outcome in enumerate(outcomes) if outcome.native is False]
    if non_native_ranks:
        disable_native(experiment.learner)
        if get_rank() == 0 and len(non_native_ranks) < len(outcomes):
            _log.warning(
                "rank %s has no working C++ compiler (on a GPU: no Triton), so that no rank uses "
                "model.native",
                ", ".join(map(str, non_native_ranks)),
            )
    sizes = [outcome.chunk_size for outcome in outcomes]
    if len(set(sizes)) > 1:  # of different GPUs
        smallest = min(size for size in sizes if isinstance(size, int))
        experiment.train_mapper = replace(experiment.train_mapper, chunk_size=smallest)


def check_same_device(devices: list[str], hosts: list[str]) -> None:
    """Refuse to train on the CPUs of some ranks and the GPUs of others.

    Args:
        devices: the device type of each rank.
        hosts: the machine of each rank.

    Raises:
        UserError: the types differ. Raised on every rank that calls it.
    """
    if len(set(devices)) > 1:
        on_cpu = [rank for rank, device in enumerate(devices) if device == "cpu"]
        machines = ", ".join(sorted({hosts[rank] for rank in on_cpu}))
        raise UserError(
            f"ranks {on_cpu} ({machines}) compute on the CPU and the others on GPUs: check the GPU "
            "driver there, or set device=cpu on all ranks."
        )
