"""Whether the outer step of a run is compiled, and its compilation before training."""

import hashlib
import logging
from dataclasses import replace

import torch
from torch import nn

from metadist.algorithms import Learner
from metadist.distributed import get_rank, get_world_size
from metadist.errors import UserError
from metadist.tasks import TaskDistribution, task_keys
from metadist.training.batching import (
    ChunkSize,
    equal_chunk_size,
    input_elements,
    max_chunk_size,
)
from metadist.training.compiled_steps import CompileOptions
from metadist.training.experiment import Experiment, TrainerConfig, make_batch
from metadist.training.strategies.strategy import Strategy
from metadist.training.task_mapper import TrainMapper

_log = logging.getLogger(__name__)

_MIN_COMPILED = 5000
"""Number of iterations from which compiling a small model saves more time than it takes."""


def compile_options(
    trainer: TrainerConfig,
    tasks: TaskDistribution,
    learner: Learner,
    device: torch.device,
    configuration: str,
    strategy: Strategy,
) -> CompileOptions | None:
    """Options for compiling the outer step of a run; None if it runs eagerly. Any rank may call it.

    A GPU captures the eager step as a CUDA graph; with `compile="auto"`, a CPU compiles the step of
    a model without convolutions in a long run. The step of a learner that computes one task at a
    time, has buffers or draws random numbers is neither captured nor compiled; with `compile=true`,
    rank zero logs the reason.

    On a CPU, the chunk size does not depend on the number of workers, so that all use one compiled
    form. A GPU computes padding at full cost, and its chunks are parts of its share of the tasks.

    Args:
        trainer: the trainer's configuration, of which `compile`, `task_chunk_size`,
            `meta_batch_size` and `iterations` are used.
        tasks: the training tasks.
        learner: the learner, in training mode.
        device: the device on which tasks are computed.
        configuration: text that determines how the learner is built.
        strategy: the run's strategy.

    Raises:
        UserError: `compile` is true, and the strategy computes one task at a time.
    """
    if not trainer.compile:
        return None
    if not strategy.sums_on_workers:
        if trainer.compile == "auto":
            return None
        raise UserError(
            f"trainer.compile=true does not apply to strategy={strategy.name} with these options, "
            "which computes one task at a time: leave it out, or take a linear reducer with "
            "strategy.gradient=worker or strategy.engine=sum."
        )
    on_gpu = device.type == "cuda"
    convolutions = any(isinstance(layer, nn.Conv2d) for layer in learner.modules())
    long_and_small = not convolutions and trainer.iterations >= _MIN_COMPILED
    worthwhile = on_gpu or (device.type == "cpu" and long_and_small)
    if trainer.compile == "auto" and not worthwhile:
        return None
    episode = tasks.sample(task_keys(0, "train", 0, range(1))[0])
    largest = max_chunk_size(learner, input_elements(episode), device, trainer.task_chunk_size)
    size = _compiled_chunk_size(largest, trainer.meta_batch_size, on_gpu)
    reason = _why_eager(learner, size)
    if reason is None:
        digest = hashlib.sha256(configuration.encode()).hexdigest()
        return CompileOptions(digest, size, on_gpu)
    if trainer.compile is True and get_rank() == 0:
        _log.warning("the outer step runs eagerly: trainer.compile=true does not apply, %s", reason)
    return None


def _compiled_chunk_size(largest: int, meta_batch_size: int, on_gpu: bool) -> int:
    """The size of equal chunks of at most `largest` tasks; 0 if that is 0."""
    tasks = -(-meta_batch_size // get_world_size()) if on_gpu else meta_batch_size
    return equal_chunk_size(tasks, largest) if largest else 0


def with_chunk_size(mapper: TrainMapper, size: ChunkSize, trainer: TrainerConfig) -> TrainMapper:
    """A mapper of a GPU with another chunk size, also of its compiled step.

    Args:
        mapper: the mapper.
        size: the largest number of tasks in a chunk; "auto" if tasks have different shapes, whose
            steps are not captured with `compile="auto"`, as each shape needs a graph.
        trainer: the trainer's configuration.
    """
    compiled = mapper.compiled
    if compiled is not None and size != "auto":
        chunk_size = _compiled_chunk_size(size, trainer.meta_batch_size, on_gpu=True)
        compiled = compiled._replace(chunk_size=chunk_size)
    elif trainer.compile == "auto":
        compiled = None
    return replace(mapper, chunk_size=size, compiled=compiled)


def _why_eager(learner: Learner, chunk_size: int) -> str | None:
    """The reason why a learner's step is not compiled; None if it can be."""
    name = learner.algorithm_name
    if not chunk_size:
        hint = "; trainer.task_chunk_size=4 batches them" if learner.supports_batched_tasks else ""
        return f"{name} with this model and dataset computes one task at a time{hint}"
    if any(True for _ in learner.buffers()):
        return f"{name} with this model has buffers, which a compiled step does not change"
    if learner.needs_task_seeds:
        return f"{name} draws random numbers"
    return None


def compile_step(experiment: Experiment) -> str | None:
    """Compile the outer step, if the run compiles it. Any rank may call it.

    Returns:
        The reason why it cannot be compiled; None if it can, or is run eagerly.
    """
    compiled = experiment.train_mapper.compiled
    if compiled is not None and not compiled.captures and get_rank() == 0:
        _log.info("compiling the outer step: seconds for an MLP, minutes for convolutions")
    keys = task_keys(0, "train", 0, range(1))
    return experiment.train_mapper.compile(experiment.learner, make_batch(experiment, keys))
