"""Batching over tasks: tasks of one shape in one computation, with a first dimension of tasks.

Small tasks spend most of their time on launching operations. The tasks of a chunk share that cost.
Each has its own copy of the parameters and its own gradient.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from metadist.algorithms import Learner, TaskResult
from metadist.algorithms.functional import buffers_by_name, call_with
from metadist.algorithms.learner import as_task_result
from metadist.errors import UserError
from metadist.tasks import Episode, Examples, select_episodes, stack_episodes
from metadist.training.precision import Precision, autocast, to_float32

ChunkSize = int | Literal["auto"]

# Input elements of a chunk, for models without `max_batched_elements`.
_MAX_ELEMENTS_CPU = 2**16
_MAX_ELEMENTS_GPU = 2**22
REAL_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
"""Types of buffers whose changes have a mean over tasks. Buffers of other types are constant."""

_MIN_CHUNK = 3
"""On a CPU, smaller chunks are slower than one task at a time."""
MAX_CHUNK = 64
"""The largest chunk if the chunk size is "auto"."""


def max_chunk_size(
    learner: Learner, elements: int, device: torch.device, chunk_size: ChunkSize
) -> int:
    """The largest number of tasks of one shape in a chunk; 0 if tasks run one at a time.

    It depends only on the learner and the shape of one task, never on the number of tasks, so that
    every rank computes a task by the same operations and with the same rounding.

    Args:
        learner: the learner that runs the tasks.
        elements: number of elements of the inputs of one task.
        device: the device on which the tasks are computed.
        chunk_size: the configured size; "auto" depends on the number of elements.
    """
    if not learner.supports_batched_tasks:
        return 0
    if chunk_size != "auto":
        return chunk_size
    limit = _MAX_ELEMENTS_GPU
    if device.type == "cpu":
        limit = getattr(learner.model, "max_batched_elements", _MAX_ELEMENTS_CPU)
    size = min(MAX_CHUNK, limit // max(1, elements))
    return size if size >= _MIN_CHUNK or device.type != "cpu" else 0


def equal_chunk_size(tasks: int, largest: int) -> int:
    """The size of the first of the fewest chunks of at most `largest` tasks whose sizes differ by
    at most one; 1 if `largest` is 0.
    """
    chunks = -(-tasks // max(1, largest))
    return -(-tasks // chunks)


def input_elements(episode: Episode) -> int:
    """The number of elements of the inputs of a task, or of stacked tasks."""
    return episode.support.inputs.numel() + episode.query.inputs.numel()


class Chunk(NamedTuple):
    """Tasks that are computed together.

    Attributes:
        keys: the tasks' keys, shape (tasks, 4).
        episodes: the tasks, every tensor with a first dimension of tasks; a single task without
            that dimension if `batched` is False.
        batched: whether to run the chunk with `forward_batched`; else it is a single task.
    """

    keys: Tensor
    episodes: Episode
    batched: bool


def split_into_chunks(
    learner: Learner,
    tasks: Iterable[tuple[Tensor, Episode]],
    count: int,
    device: torch.device,
    chunk_size: ChunkSize,
) -> Iterator[Chunk]:
    """Split tasks, in order, into chunks of one shape whose sizes differ by at most one.

    If the learner's outputs are features, the tasks of a chunk also have one number of classes.

    Args:
        learner: the learner that runs the tasks, on the device.
        tasks: keys and episodes.
        count: the number of tasks.
        device: the device to which each chunk is copied as a whole.
        chunk_size: see `max_chunk_size`.
    """

    def make_chunk(members: list[tuple[Tensor, Episode]], batched: bool) -> Chunk:
        keys = torch.stack([key for key, _ in members])
        episodes = [episode for _, episode in members]
        episode = stack_episodes(episodes) if batched else episodes[0]
        return Chunk(keys, to_device(episode, device), batched)

    chunk: list[tuple[Tensor, Episode]] = []
    shapes: list[Any] | None = None
    largest, size = 0, 1
    for number, (key, episode) in enumerate(tasks):
        task_shapes: list[Any] = [*episode.shapes, *last_classes(learner, episode)]
        if task_shapes != shapes or len(chunk) == size:
            if chunk:
                yield make_chunk(chunk, largest > 0)
            chunk, shapes = [], task_shapes
            largest = max_chunk_size(learner, input_elements(episode), device, chunk_size)
            size = equal_chunk_size(max(1, count - number), largest)
        chunk.append((key, episode))
    if chunk:
        yield make_chunk(chunk, largest > 0)


def split_stacked(
    learner: Learner,
    keys: Tensor,
    episodes: Episode,
    device: torch.device,
    chunk_size: ChunkSize,
) -> Iterator[Chunk]:
    """Split stacked tasks into chunks; see `split_into_chunks`.

    Args:
        learner: the learner that runs the tasks, on the device.
        keys: the tasks' keys, shape (tasks, 4).
        episodes: the tasks, every tensor with a first dimension of tasks.
        device: the device to which the tasks are copied.
        chunk_size: see `max_chunk_size`.
    """
    if len(set(last_classes(learner, episodes))) > 1:
        tasks = (
            (key, copy_episode(select_episodes(episodes, index))) for index, key in enumerate(keys)
        )
        yield from split_into_chunks(learner, tasks, len(keys), device, chunk_size)
        return
    elements = input_elements(episodes) // len(keys)
    largest = max_chunk_size(learner, elements, device, chunk_size)
    episodes = to_device(episodes, device)
    start = 0
    while start < len(keys):
        left = len(keys) - start
        stop = start + equal_chunk_size(left, largest)
        if not largest:
            yield Chunk(keys[start:stop], copy_episode(select_episodes(episodes, start)), False)
        elif stop - start == len(keys):
            yield Chunk(keys, episodes, True)
        else:
            part = slice(start, stop)
            yield Chunk(keys[part], select_episodes(episodes, part), True)
        start = stop


def last_classes(learner: Learner, episodes: Episode) -> list[int]:
    """The last class of a task, or of each of stacked tasks, if outputs are features; else [].

    Features are compared with those of each class, so that shapes depend on the number of classes.
    """
    targets = episodes.support.targets
    if learner.outputs_are_classes or learner.regression or not targets.numel():
        return []
    return targets.amax(-1).view(-1).tolist()


def copy_episode(episode: Episode) -> Episode:
    """A copy of an episode that is part of a batch.

    The rounding of matrix products depends on the alignment of memory. In a copy, the alignment
    does not depend on the episode's position in a batch.
    """
    return Episode(*(Examples(inputs.clone(), targets.clone()) for inputs, targets in episode))


def to_device(episodes: Episode, device: torch.device) -> Episode:
    """Copy tasks to a device; to a CUDA device from pinned memory, without waiting."""
    if device.type == "cpu":
        return episodes
    cuda = device.type == "cuda"

    def copied(tensor: Tensor) -> Tensor:
        if cuda and tensor.is_cpu:
            # Not by `pin_memory`, which does not copy expanded tensors.
            tensor = torch.empty_like(tensor, pin_memory=True).copy_(tensor)
        return tensor.to(device, non_blocking=cuda)

    return Episode(*(Examples(copied(x), copied(y)) for x, y in episodes))


def forward_batched(
    learner: Learner,
    parameters: Mapping[str, Tensor],
    episodes: Episode,
    precision: Precision = "float32",
) -> tuple[TaskResult, dict[str, Tensor]]:
    """Run the learner on several tasks at once.

    Args:
        learner: a learner with `supports_batched_tasks`.
        parameters: values of all of the learner's parameters, by name. Their copies require grad
            if they do.
        episodes: the tasks, every tensor with a first dimension of tasks.
        precision: the precision of the tasks' computation.

    Returns:
        The result, every tensor with a first dimension of tasks, with the tasks' changes of the
        buffers in training; and each task's copy of the parameters, by name, with respect to which
        the sum of the losses can be differentiated.
    """
    count = len(episodes.query.inputs)
    task_parameters = {
        name: _repeat(parameter.detach(), count).requires_grad_(parameter.requires_grad)
        for name, parameter in parameters.items()
    }
    before = buffers_by_name(learner)
    buffers = {name: _repeat(buffer.detach(), count) for name, buffer in before.items()}
    tensors = task_parameters | buffers
    device = episodes.query.inputs.device
    with autocast(precision, device), differentiable_attention(learner):
        result = as_task_result(call_with(learner, tensors, episodes), learner, (count,))
    if precision == "bf16":
        result = to_float32(result)
    if before and learner.training:
        result = result._replace(buffers=buffer_changes(before, tensors))
    return result, task_parameters


def differentiable_attention(learner: Learner) -> contextlib.AbstractContextManager[None]:
    """In training, use the kernel of scaled dot product attention that has second derivatives."""
    return sdpa_kernel(SDPBackend.MATH) if learner.training else contextlib.nullcontext()


def buffer_changes(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The changes that tasks made to a learner's buffers of numbers, float64.

    Infinite elements, such as those of an attention mask, count as zero before the task, because
    differences of infinite numbers are NaN.

    Raises:
        UserError: a buffer has another size after a task, or a buffer of another type, such as a
            mask, has changed, and its changes have no mean over tasks.
    """
    changes = {}
    for name, buffer in before.items():
        if after[name].shape[after[name].dim() - buffer.dim() :] != buffer.shape:
            raise UserError(
                f"the buffer {name} of shape {tuple(buffer.shape)} has the shape "
                f"{tuple(after[name].shape)} after a task, and tasks start from the same buffers: "
                "give it a fixed size, or keep what grows outside of the learner."
            )
        if buffer.dtype in REAL_TYPES:
            changes[name] = after[name].double() - finite_or_zero(buffer)
        elif buffer.dtype in _INTEGERS:  # not as float64, which rounds large numbers
            changes[name] = (after[name].long() - buffer.long()).double()
        elif not torch.equal(after[name], buffer.expand_as(after[name])):
            raise UserError(
                f"the buffer {name} of type {buffer.dtype} changes in training, and has no mean "
                "over tasks: keep it constant, or of floating-point numbers."
            )
    return changes


def finite_or_zero(buffer: Tensor) -> Tensor:
    """A copy of a buffer with zero in place of infinite and NaN elements."""
    return torch.where(buffer.isfinite(), buffer, 0)


def _repeat(parameter: Tensor, tasks: int) -> Tensor:
    """A copy of a parameter for each task, (tasks, *shape).

    Copies, not views: an operation that needs contiguous memory would copy a view of several
    tasks but not a view of one, and the order in which autograd adds up gradients would depend on
    the number of tasks. Convolution weights are in the order in which kernels and products read
    them, (tasks, height, width, in, out).
    """
    if parameter.dim() != 4:
        return parameter.expand(tasks, *parameter.shape).clone(
            memory_format=torch.contiguous_format
        )
    weight = parameter.permute(2, 3, 1, 0).contiguous()
    copies = weight.expand(tasks, *weight.shape).clone(memory_format=torch.contiguous_format)
    return copies.permute(0, 4, 3, 1, 2)
