"""Whether the outer step of a run is compiled, and its compilation before training."""

import logging
from collections.abc import Callable
from dataclasses import replace

from torch import nn

from metadist.algorithms import Learner
from metadist.distributed import get_rank, get_world_size
from metadist.distributed.job import current_job
from metadist.tasks import task_keys
from metadist.training.batching import equal_chunk_size, input_elements, max_chunk_size
from metadist.training.compiled_steps import CompiledSteps
from metadist.training.device import resolve_device
from metadist.training.experiment import Experiment, make_batch
from metadist.training.step_blocks import StepBlocks, block_size

_log = logging.getLogger(__name__)

_MIN_COMPILED = 5000
"""Number of iterations from which compiling a small model saves more time than it takes."""


def compile_step(
    experiment: Experiment,
    gather: Callable[[str], list[str]] = lambda error: [error],
) -> None:
    """Compile the outer step of training, or capture it on a GPU, if `trainer.compile` asks for it.

    Every rank calls it, once all use the same kernels and the same chunk size. If one of them
    cannot compile the step, it runs eagerly on all ranks, and rank zero logs the reason. Compiled
    or not, outer steps are taken in blocks if `block_size` allows it.

    Args:
        experiment: the experiment, whose `train_mapper` and `step_blocks` are replaced.
        gather: a function that returns the values of all ranks. It is called if the step is to be
            compiled. Default: this rank's value alone.
    """
    steps, size = steps_to_compile(experiment), block_size(experiment)
    blocks = StepBlocks(experiment, size, compiles=steps is not None) if size > 1 else None
    experiment.step_blocks = blocks
    if steps is None:
        return
    if not steps.captures and get_rank() == 0:
        _log.info("compiling the outer step: seconds for an MLP, minutes for convolutions")
    mapper = experiment.train_mapper
    batch = make_batch(experiment, task_keys(0, "train", 0, range(1)))
    # Only what training calls first: blocks, or single steps.
    compiled = (blocks and blocks.compiled) or steps
    errors = gather(mapper.compile(compiled, experiment.learner, batch))
    failed_ranks = [rank for rank, error in enumerate(errors) if error]
    if not failed_ranks:
        local_steps = current_job().worker_local("compiled_steps", steps)
        experiment.train_mapper = replace(mapper, compiled=local_steps)
        return
    if blocks is not None:
        blocks.compiled = None
    steps.log_eager(
        errors[failed_ranks[0]],
        f"on rank {', '.join(map(str, failed_ranks))} ",
        "; trainer.compile=false avoids the attempt",
    )


def steps_to_compile(experiment: Experiment) -> CompiledSteps | None:
    """What compiles the outer step; None if it runs eagerly. Any rank may call it.

    A GPU captures the eager step as a CUDA graph; with `compile="auto"`, a CPU compiles the step of
    a model without convolutions in a long run. The step of a learner that computes one task at a
    time, has buffers or draws random numbers is neither captured nor compiled; with `compile=true`,
    rank zero logs the reason. A strategy that computes one task at a time compiles none.

    On a CPU, the chunk size does not depend on the number of workers, so that all use one compiled
    form. A GPU computes padding at full cost, and its chunks are parts of its share of the tasks.

    Args:
        experiment: the experiment, with the chunk size of all ranks.
    """
    trainer, mapper = experiment.trainer_config, experiment.train_mapper
    if not trainer.compile or not experiment.strategy.sums_on_workers:
        return None
    learner, device = experiment.learner.train(), resolve_device(mapper.device)
    on_gpu = device.type == "cuda"
    if trainer.compile == "auto":
        if on_gpu:
            # Tasks of different shapes have no measured chunk size; each shape would need a graph.
            worthwhile = mapper.chunk_size != "auto"
        else:
            convolutions = any(isinstance(layer, nn.Conv2d) for layer in learner.modules())
            long = trainer.iterations >= _MIN_COMPILED
            worthwhile = device.type == "cpu" and long and not convolutions
        if not worthwhile:
            return None
    episode = experiment.tasks.sample(task_keys(0, "train", 0, range(1))[0])
    largest = max_chunk_size(learner, input_elements(episode), device, mapper.chunk_size)
    reason = _why_eager(learner, largest)
    if reason is None:
        tasks = trainer.meta_batch_size
        size = equal_chunk_size(-(-tasks // get_world_size()) if on_gpu else tasks, largest)
        return CompiledSteps(size, captures=on_gpu)
    if trainer.compile is True and get_rank() == 0:
        _log.warning("the outer step runs eagerly: trainer.compile=true does not apply, %s", reason)
    return None


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
