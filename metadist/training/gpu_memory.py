"""The number of tasks that a GPU computes at once, from the memory that they take."""

from dataclasses import replace

import torch

from metadist.algorithms import Learner
from metadist.distributed import get_local_world_size, module_clone
from metadist.tasks import TaskDistribution, stack_episodes, task_keys
from metadist.training.batching import MAX_CHUNK, ChunkSize, to_device
from metadist.training.device import resolve_device
from metadist.training.experiment import Experiment
from metadist.training.outer_step import StepArguments, outer_step
from metadist.training.precision import Precision, tensor_float32

_SHARE = 0.4
"""The share of a GPU's memory for the outer step; a captured step keeps its memory."""
_COUNTS = (4, 4, 2)
"""Tasks in the measured steps; the first one also allocates workspaces of libraries."""


def measure_chunk_size(experiment: Experiment) -> None:
    """Set the chunk size of training if it is "auto" and tasks are computed on a GPU.

    Any rank may call it.

    Args:
        experiment: the experiment, whose `train_mapper` is replaced.
    """
    mapper = experiment.train_mapper
    device = resolve_device(mapper.device)
    if (
        device.type == "cuda"
        and mapper.chunk_size == "auto"
        and experiment.strategy.sums_on_workers
    ):
        size = gpu_chunk_size(experiment.learner, experiment.tasks, device, mapper.precision)
        experiment.train_mapper = replace(mapper, chunk_size=size)


def gpu_chunk_size(
    learner: Learner, tasks: TaskDistribution, device: torch.device, precision: Precision
) -> ChunkSize:
    """The number of tasks whose outer step takes at most 40% of a GPU's memory.

    Processes that use the same GPU share it. The memory per task is measured on training tasks. It
    is the same on equal GPUs, and so is the number.

    Args:
        learner: the learner, on any device.
        tasks: the training tasks.
        device: the GPU on which tasks are computed.
        precision: the precision of the tasks' computation.

    Returns:
        The number, from 1 to `MAX_CHUNK`; "auto" if the learner computes one task at a time, the
        shapes of tasks differ, or more tasks do not take more memory.
    """
    if not learner.supports_batched_tasks:
        return "auto"
    keys = task_keys(0, "train", 0, range(max(_COUNTS)))
    episodes = [tasks.sample(key) for key in keys]
    if any(episode.shapes != episodes[0].shapes for episode in episodes):
        return "auto"
    clone = module_clone(learner, by="reference", detach_buffers=True, device=device)
    learner = clone.train()
    parameters = dict(learner.named_parameters())
    peaks = []
    try:
        for count in _COUNTS:
            learner.task_seeds = range(count)
            stacked = to_device(stack_episodes(episodes[:count]), device)
            weights = torch.ones(count, dtype=torch.float64, device=device)
            torch.cuda.reset_peak_memory_stats(device)
            with tensor_float32(precision, device):
                outer_step(StepArguments(learner, parameters, stacked, weights, precision))
            peaks.append(torch.cuda.max_memory_allocated(device))
    except torch.OutOfMemoryError:
        return 1
    finally:
        torch.cuda.empty_cache()
    per_task = (peaks[1] - peaks[2]) // (_COUNTS[1] - _COUNTS[2])
    if per_task <= 0:
        return "auto"
    processes = -(-get_local_world_size() // torch.cuda.device_count())
    memory = torch.cuda.mem_get_info(device)[1] * _SHARE / processes
    fixed = peaks[2] - _COUNTS[2] * per_task  # parameters, images of a dataset, workspaces
    return max(1, min(MAX_CHUNK, int((memory - fixed) / per_task)))
