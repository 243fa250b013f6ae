"""Mappers of meta-learning: a worker's computation on its shard of a meta-batch."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor, nn

from metadist.algorithms import Learner, TaskResult
from metadist.algorithms.functional import buffers_by_name, call_with, parameters_by_name
from metadist.algorithms.learner import as_task_result, require_equal_metrics
from metadist.distributed import module_clone
from metadist.distributed.reducers import mean_reducer
from metadist.distributed.responses import Gradients, WorkerResponse
from metadist.distributed.worker_local import WorkerLocal
from metadist.distributed.worker_request import Call
from metadist.errors import UserError, first_line
from metadist.profile_ranges import profile_range
from metadist.tasks import Episode, random_state, seed_from, select_episodes
from metadist.training.batching import (
    MAX_CHUNK,
    Chunk,
    ChunkSize,
    buffer_changes,
    copy_episode,
    differentiable_attention,
    forward_batched,
    split_into_chunks,
    split_stacked,
    to_device,
)
from metadist.training.compiled_steps import CompiledSteps
from metadist.training.device import resolve_device
from metadist.training.outer_step import (
    StepArguments,
    StepSum,
    gradients_of,
    outer_step,
    weighted_step_sum,
)
from metadist.training.precision import Precision, autocast, tensor_float32, to_float32
from metadist.training.profiling import profiled_request
from metadist.training.query_predictions import QUERIES, QUERY_VALUES, query_values

TASK_INDEX = "task.index"
"""The name of the tasks' indices, the last column of their keys, in a mapper's result."""


def order_of_tasks(indices: Tensor, keys: Tensor) -> Tensor:
    """The permutation that brings values from the order of the shards into the order of `keys`.

    Args:
        indices: the indices of the tasks in the order of the shards, shape (tasks,).
        keys: the keys of the same tasks, shape (tasks, 4).

    Raises:
        UserError: the shards have lost or repeated tasks.
    """
    found, positions = indices.sort(stable=True)
    expected, order = keys[:, 3].sort(stable=True)
    if not torch.equal(found, expected):
        raise UserError(
            f"the partitioner's shards have {len(indices)} tasks, {len(indices.unique())} of them "
            f"different, of a batch of {len(keys)}: give each task to one shard."
        )
    return torch.empty_like(positions).scatter_(0, order, positions)


class MetaBatch(NamedTuple):
    """Tasks that a partitioner can split: every tensor has a first dimension of tasks.

    Attributes:
        keys: the tasks' keys, int64, shape (tasks, 4), or (4,) for a single task whose dimension
            was removed.
        episodes: the tasks themselves if rank zero samples them; else None, and the workers sample
            the tasks from the keys.
    """

    keys: Tensor
    episodes: Episode | None = None

    @property
    def size(self) -> int:
        """The number of tasks."""
        return 1 if self.keys.dim() == 1 else len(self.keys)

    def select(self, tasks: slice) -> "MetaBatch":
        """The tasks of a slice, for a partitioner's shard."""
        if self.episodes is None:
            return MetaBatch(self.keys[tasks])
        return MetaBatch(self.keys[tasks], select_episodes(self.episodes, tasks))

    def with_task_dimension(self) -> "MetaBatch":
        """The same tasks; a single task gets back the dimension that was removed."""
        return as_batch_of_one(self) if self.keys.dim() == 1 else self


@dataclass(frozen=True)
class TaskMapper:
    """Runs a learner on tasks. Only its fields are sent to other workers.

    Attributes:
        tasks: the worker's own `TaskDistribution`.
        device: the device on which the learner computes; "auto" is the GPU of the local rank if
            there is one, else the CPU.
        chunk_size: number of tasks in a batch, if the learner supports batched tasks; "auto"
            depends on the tasks' size.
        evaluate_each_step: whether evaluation also evaluates the queries after each inner step.
        precision: the precision of the tasks' computation.
    """

    tasks: WorkerLocal
    device: str = "auto"
    chunk_size: ChunkSize = "auto"
    evaluate_each_step: bool = False
    precision: Precision = "float32"

    def run_each(self, learner: Learner, batch: MetaBatch) -> list[TaskResult]:
        """Run the batch's tasks one at a time and return their results, in order.

        Each task starts from the learner's initial buffers and from its own random state (of torch,
        for dropout, of NumPy and of Python), so that its result depends only on its key.
        """
        device = resolve_device(self.device)
        learner, _ = self.prepare(learner, device)
        with tensor_float32(self.precision, device):
            return [
                self._run_one(learner, key, to_device(episode, device))
                for key, episode in self._sample_each([batch.with_task_dimension()])
            ]

    def _chunks(
        self,
        batches: list[MetaBatch],
        learner: Learner,
        device: torch.device,
        chunk_size: ChunkSize,
    ) -> Iterator[Chunk]:
        """Sample the tasks of several batches, in order, and split them into chunks.

        Tasks are sampled together as long as the distribution does that, the others one by one.
        """
        count, done = sum(batch.size for batch in batches), 0
        for keys, episodes in self._sample_stacked(batches, device, chunk_size):
            yield from split_stacked(learner, keys, episodes, device, chunk_size)
            done += len(keys)
        if done < count:
            rest = islice(self._sample_each(batches), done, None)
            yield from split_into_chunks(learner, rest, count - done, device, chunk_size)

    def _sample_stacked(
        self, batches: list[MetaBatch], device: torch.device, chunk_size: ChunkSize
    ) -> Iterator[tuple[Tensor, Episode]]:
        """Keys and stacked tasks, until `sample_batch` returns None; nothing without it."""
        sample_batch = getattr(self.tasks.value, "sample_batch", None)
        if sample_batch is None or any(batch.episodes is not None for batch in batches):
            return
        batch_size = MAX_CHUNK
        if chunk_size != "auto":  # whole chunks
            batch_size = max(1, MAX_CHUNK // chunk_size) * chunk_size
        parts = [batch.keys for batch in batches]
        all_keys = parts[0] if len(parts) == 1 else torch.cat(parts)
        for keys in all_keys.split(batch_size):
            with profile_range("data"):
                episodes = sample_batch(keys, device)
            if episodes is None:
                return
            yield keys, episodes

    def _sample_each(self, batches: list[MetaBatch]) -> Iterator[tuple[Tensor, Episode]]:
        """Keys and tasks, sampled one by one, or copied from a batch that was sent with them."""
        for batch in batches:
            for index, key in enumerate(batch.keys):
                if batch.episodes is None:
                    with profile_range("data"):
                        episode = self.tasks.value.sample(key)
                else:
                    episode = copy_episode(select_episodes(batch.episodes, index))
                yield key, episode

    def prepare(
        self, learner: Learner, device: torch.device
    ) -> tuple[Learner, dict[str, nn.Parameter]]:
        """The learner on the device, with this mapper's options, and its parameters."""
        if device.type == "cuda":
            torch.cuda.set_device(device)  # of this thread: requests run on threads of their own
        parameters = parameters_by_name(learner)
        first = next(iter(parameters.values()), None)
        if first is not None and first.device != device:
            learner = module_clone(learner, by="reference", device=device)
            parameters = parameters_by_name(learner)
        learner.evaluate_each_step = self.evaluate_each_step
        return learner, parameters

    def _run_one(self, learner: Learner, key: Tensor, episode: Episode) -> TaskResult:
        with (
            random_state(task_seed(key), episode.query.inputs.device),
            profile_range("forward"),
            _without_gradients(learner),
        ):
            return self._run_with_buffers(learner, episode)

    def _run_with_buffers(self, learner: Learner, episode: Episode) -> TaskResult:
        """Run the learner on a task; the result includes the task's changes of its buffers."""
        before = buffers_by_name(learner)
        buffers = {name: buffer.detach().clone() for name, buffer in before.items()}
        device = episode.query.inputs.device
        with autocast(self.precision, device), differentiable_attention(learner):
            result = as_task_result(call_with(learner, buffers, episode), learner)
        if self.precision == "bf16":
            result = to_float32(result)
        if not before or not learner.training:
            return result
        return result._replace(buffers=buffer_changes(before, buffers))


@dataclass(frozen=True)
class TrainMapper(TaskMapper):
    """Mapper of training: the mean, or a weighted sum, of loss and metrics of a shard's tasks.

    Attributes:
        profile: whether workers that do not run the training loop record a profile.
        compiled: the worker's own `CompiledSteps` for batched tasks; None runs them eagerly.
    """

    profile: bool = False
    compiled: WorkerLocal | None = None

    def __call__(self, learner: Learner, batch: MetaBatch) -> TaskResult:
        """Returns a `TaskResult` whose loss can be differentiated.

        Called with distributed autograd, the engine "ddp" or a reducer that is no `LinearReducer`;
        otherwise strategies call `weighted_sum`.
        """
        with profiled_request(self.profile):
            results = self.run_each(learner.train(), batch)
        require_equal_metrics(learner, [result.metrics for result in results])
        return mean_reducer([result._replace(predictions=None) for result in results])

    def weighted_sum(
        self, calls: list[Call], weights: list[float], inputs: Sequence[Tensor]
    ) -> WorkerResponse:
        """See `SummingMapper`. Computes one chunk of tasks at a time, which bounds the memory."""
        device = resolve_device(self.device)
        learner, batches = _learner_and_batches(calls)
        values: list[Any] = []
        gradients: list[Tensor | None] = [None] * len(inputs)
        dtypes: list[torch.dtype | None] = []
        with (
            profiled_request(self.profile),
            tensor_float32(self.precision, device),
            _out_of_memory_errors(learner, self.chunk_size),
        ):
            learner, parameters = self.prepare(learner.train(), device)
            for step in self._chunk_sums(learner, parameters, batches, weights, device):
                dtypes = dtypes or step.dtypes
                values.append(step.result)
                for i, gradient in enumerate(step.gradients):
                    if gradient is not None:
                        gradients[i] = _add(gradients[i], gradient)
        require_equal_metrics(learner, [value.metrics for value in values])
        none = all(gradient is None for gradient in gradients)
        total = values[0]
        if len(values) > 1:
            total = optree.tree_map(lambda *parts: torch.stack(parts).sum(0), *values)
        loss_leaf = 0  # the first field of a TaskResult
        return WorkerResponse(total, None if none else Gradients(loss_leaf, gradients), dtypes)

    def _chunk_sums(
        self,
        learner: Learner,
        parameters: dict[str, nn.Parameter],
        batches: list[MetaBatch],
        call_weights: Sequence[float],
        device: torch.device,
    ) -> Iterator[StepSum]:
        """The weighted sum of each chunk of tasks: compiled, eager, or for a single task."""
        # Copied to the device before the steps, which then wait for no copy.
        weights = task_weights([batch.size for batch in batches], call_weights).to(device)
        step: Callable[[StepArguments], StepSum] = outer_step
        size = self.chunk_size
        if self.compiled is not None:
            step = self.compiled.value
            size = self.compiled.value.chunk_size
        done = 0
        for chunk in self._chunks(batches, learner, device, size):
            weight = weights
            if len(chunk.keys) < len(weights):
                # A copy, since the rounding of products depends on the alignment of memory.
                weight = weights[done : done + len(chunk.keys)].clone()
            done += len(chunk.keys)
            set_task_seeds(learner, chunk.keys)
            arguments = StepArguments(learner, parameters, chunk.episodes, weight, self.precision)
            if chunk.batched:
                yield step(arguments)
            else:
                yield self._single_step(learner, chunk, weight)

    def compile(self, steps: CompiledSteps, learner: Learner, batch: MetaBatch) -> str:
        """Compile the step for tasks of the batch's shape.

        Returns:
            The reason why it cannot be compiled; "" if it can, or if the tasks are not batched.
        """
        device = resolve_device(self.device)
        learner, parameters = self.prepare(learner.train(), device)
        chunk = next(self._chunks([batch], learner, device, steps.chunk_size))
        if not chunk.batched:
            return ""
        weights = torch.ones(len(chunk.keys), dtype=torch.float64, device=device)
        arguments = StepArguments(learner, parameters, chunk.episodes, weights, self.precision)
        with tensor_float32(self.precision, device):
            return steps.compile(arguments)

    def _single_step(self, learner: Learner, chunk: Chunk, weight: Tensor) -> StepSum:
        """The step of a task that is not batched."""
        result = self._run_one(learner, chunk.keys[0], chunk.episodes)
        gradients = gradients_of(result.loss, learner.parameters())
        with profile_range("reduce"):
            return weighted_step_sum(as_batch_of_one(result), as_batch_of_one(gradients), weight)


@dataclass(frozen=True)
class EvaluateMapper(TaskMapper):
    """Mapper of evaluation: each task's loss and metrics.

    Attributes:
        return_predictions: whether to also return predictions and targets of the queries.
    """

    return_predictions: bool = False

    def __call__(self, learner: Learner, batch: MetaBatch) -> dict[str, Tensor]:
        """Returns "loss", the metrics and `TASK_INDEX`, each of shape (tasks in the shard,), on the
        CPU.

        With `return_predictions`, also the tensors of `query_values`.
        """
        return self.map_batched([((learner, batch), {})])[0]

    @torch.no_grad()
    def map_batched(self, calls: list[Call]) -> list[dict[str, Tensor]]:
        """See `BatchedMapper`."""
        device = resolve_device(self.device)
        chunks: list[dict[str, Tensor]] = []
        learner, batches = _learner_and_batches(calls)
        learner, parameters = self.prepare(learner.eval(), device)
        with (
            tensor_float32(self.precision, device),
            _out_of_memory_errors(learner, self.chunk_size),
        ):
            for chunk in self._chunks(batches, learner, device, self.chunk_size):
                set_task_seeds(learner, chunk.keys)
                if chunk.batched:
                    with profile_range("forward"):
                        result, _ = forward_batched(
                            learner, parameters, chunk.episodes, self.precision
                        )
                else:
                    result = as_batch_of_one(self._run_one(learner, chunk.keys[0], chunk.episodes))
                values = {"loss": result.loss, **result.metrics, TASK_INDEX: chunk.keys[:, 3]}
                if self.return_predictions:
                    targets = chunk.episodes.query.targets
                    targets = targets if chunk.batched else targets.unsqueeze(0)
                    values |= query_values(result.predictions, targets)
                chunks.append(values)
        require_equal_metrics(learner, chunks)
        counts = [batch.size for batch in batches]
        whole = {name: torch.cat([part[name] for part in chunks]).cpu() for name in chunks[0]}
        lengths = dict.fromkeys(whole, counts)
        if self.return_predictions:
            queries = [int(call_queries.sum()) for call_queries in whole[QUERIES].split(counts)]
            lengths |= dict.fromkeys(QUERY_VALUES, queries)
        split = {name: tensor.split(lengths[name]) for name, tensor in whole.items()}
        return [{name: parts[i] for name, parts in split.items()} for i in range(len(calls))]


@contextlib.contextmanager
def _out_of_memory_errors(learner: Learner, chunk_size: ChunkSize) -> Iterator[None]:
    """Raise an error of the GPU's memory as one that names the option to change."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        if chunk_size != 1 and learner.supports_batched_tasks:
            advice = (
                f"a chunk of tasks (trainer.task_chunk_size={chunk_size}): set a smaller number"
            )
        else:
            advice = "one task: take a smaller model, fewer task.queries, or trainer.precision=bf16"
        raise UserError(
            f"the GPU's memory does not suffice for {advice}. {first_line(error)}"
        ) from error


def _learner_and_batches(calls: list[Call]) -> tuple[Learner, list[MetaBatch]]:
    """The learner of a mapper's calls, which is the same in all calls, and the batch of each."""
    arguments = [_mapper_arguments(*args, **kwargs) for args, kwargs in calls]
    return arguments[0][0], [batch.with_task_dimension() for _, batch in arguments]


def _mapper_arguments(learner: Learner, batch: MetaBatch) -> tuple[Learner, MetaBatch]:
    """The arguments of a mapper, which a partitioner may also give by name."""
    return learner, batch


@contextlib.contextmanager
def _without_gradients(learner: Learner) -> Iterator[None]:
    """Let a learner that calls `backward` in a task accumulate gradients of this task alone."""
    parameters = [parameter for parameter in learner.parameters() if parameter.is_leaf]
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


def as_batch_of_one(tree: Any) -> Any:
    """A single task's tensors with a first dimension of one, detached."""
    return optree.tree_map(lambda leaf: leaf.detach().unsqueeze(0), tree)


def task_weights(sizes: Sequence[int], weights: Sequence[float]) -> Tensor:
    """The weight of each task in a sum over calls, float64, shape (tasks,).

    Args:
        sizes: the number of tasks of each call, whose result is the mean over them.
        weights: the weight of each call's result.
    """
    parts = [
        torch.full((size,), weight / max(1, size), dtype=torch.float64)
        for size, weight in zip(sizes, weights, strict=True)
    ]
    return torch.cat(parts)


def _add(total: Tensor | None, term: Tensor) -> Tensor:
    return term if total is None else total.add_(term)


def task_seed(key: Tensor) -> int:
    """The seed of a task's random numbers, except those with which the task is sampled."""
    return seed_from(*key.tolist(), 1)  # the key alone is the seed of the sampling


def set_task_seeds(learner: Learner, keys: Tensor) -> None:
    """Give a learner that draws random numbers for batched tasks the seeds of these tasks."""
    if learner.needs_task_seeds:
        learner.task_seeds = [task_seed(key) for key in keys]
