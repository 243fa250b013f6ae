"""The mappers of meta-learning: what a worker does with its part of a meta-batch."""

import random
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import optree
import torch
from torch import Tensor

from metadist.algorithms import Learner, TaskResult
from metadist.distributed import get_local_rank, module_clone
from metadist.distributed.phases import Recording, phase, recorded
from metadist.distributed.reducers import leaf_dtypes
from metadist.distributed.residents import Resident
from metadist.distributed.visits import Answer, Call, Gradients
from metadist.errors import UserError
from metadist.tasks import Episode, Examples
from metadist.training.side_by_side import TasksAtOnce, groups, together
from metadist.training.task_phases import told_apart

_moved: "weakref.WeakKeyDictionary[Learner, Learner]" = weakref.WeakKeyDictionary()


class MetaBatch(NamedTuple):
    """Some tasks, as partitioners split them: every tensor's first dimension counts tasks.

    Attributes:
        keys: int64, shape (tasks, 4), or (4,) for a single task whose dimension was removed.
        episodes: the tasks themselves where only rank zero holds the dataset; else None, and
            whoever gets the keys draws them.
    """

    keys: Tensor
    episodes: Episode | None = None

    def count(self) -> int:
        """How many tasks."""
        return 1 if self.keys.dim() == 1 else len(self.keys)


@dataclass(frozen=True)
class TaskMapper:
    """Runs a learner on tasks. It crosses to other workers as names and settings alone.

    Attributes:
        tasks: the worker's own `TaskDistribution`.
        device: where the learner computes; "auto" is the GPU of the local rank, else the CPU.
        tasks_at_once: how many tasks run side by side, if the learner can; "auto" goes by the
            tasks' size.
        each_step: in evaluation, queries are also judged after each inner step; see `Learner`.
        recording: what is recorded of this step in the worker's own process, for a profile.
    """

    tasks: Resident
    device: str = "auto"
    tasks_at_once: TasksAtOnce = "auto"
    each_step: bool = False
    recording: Recording = "no"

    def each(self, learner: Learner, batch: MetaBatch) -> list[TaskResult]:
        """The results of the batch's tasks, in order, one by one.

        Each task starts from the learner's buffers as they came, and from a random state of its
        own (of torch, for dropout, of numpy and of Python), so that its result depends on nothing
        but its key.
        """
        device = resolve_device(self.device)
        learner = self._ready(learner, device)
        return [self._one(learner, key, episode) for key, episode in self._tasks(batch, device)]

    def _results(
        self, calls: list[Call], learner: Learner
    ) -> Iterator[tuple[TaskResult, dict[str, Tensor]]]:
        """The results of several batches of one learner, in order, tasks side by side if that
        pays: then with each task's own parameters, else without any, for a single task.
        """
        device = resolve_device(self.device)
        learner = self._ready(learner, device)
        batches = [learner_and_batch(call)[1] for call in calls]
        tasks = (task for batch in batches for task in self._tasks(batch, device))
        count = sum(batch.count() for batch in batches)
        for several, group in groups(learner, tasks, count, self.tasks_at_once):
            if several:
                yield together(learner, [episode for _, episode in group])
            else:
                yield self._one(learner, *group[0]), {}

    def _ready(self, learner: Learner, device: torch.device) -> Learner:
        learner = _on_device(learner, device)
        learner.each_step = self.each_step
        return learner

    def _one(self, learner: Learner, key: Tensor, episode: Episode) -> TaskResult:
        device = episode.query.inputs.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            number = hash(tuple(key.tolist()))
            _generator(device).manual_seed(number)
            np.random.seed(number % 2**32)
            random.seed(number)
            return _with_buffers(learner, episode)

    def _tasks(self, batch: MetaBatch, device: torch.device) -> Iterator[tuple[Tensor, Episode]]:
        single = batch.keys.dim() == 1
        for place, key in enumerate(batch.keys.unsqueeze(0) if single else batch.keys):
            if batch.episodes is None:
                with phase("data"):
                    episode = self.tasks.value.draw(key)
            elif single:
                episode = batch.episodes
            else:
                parts = (Examples(p.inputs[place], p.targets[place]) for p in batch.episodes)
                episode = Episode(*parts)
            yield key, _to(episode, device)


class TrainTasks(TaskMapper):
    """Mapper of training: the mean loss and metrics of the tasks in a shard."""

    def __call__(self, learner: Learner, batch: MetaBatch) -> TaskResult:
        """Returns a `TaskResult` whose loss can be differentiated."""
        with recorded(self.recording):
            results = self.each(learner.train(), batch)
        if len(results) == 1:
            return results[0]._replace(predictions=None)
        return TaskResult(
            torch.stack([result.loss for result in results]).mean(),
            {
                name: torch.stack([result.metrics[name] for result in results]).mean()
                for name in results[0].metrics
            },
            buffers={
                name: torch.stack([result.buffers[name] for result in results]).mean(0)
                for name in results[0].buffers
            },
        )

    def weighted_sum(self, calls: list[Call], weights: list[float], inputs: list[Tensor]) -> Answer:
        """See `WeightedSum`: a few tasks at a time, so that memory does not grow with the tasks."""
        with recorded(self.recording):
            return self._weighted_sum(calls, weights, inputs)

    def _weighted_sum(
        self, calls: list[Call], weights: list[float], inputs: list[Tensor]
    ) -> Answer:
        original = learner_and_batch(calls[0])[0].train()
        names = {id(parameter): name for name, parameter in original.named_parameters()}
        counts = [learner_and_batch(call)[1].count() for call in calls]
        shares = [w / count for w, count in zip(weights, counts, strict=True)]
        of_tasks = iter([w for w, count in zip(shares, counts, strict=True) for _ in range(count)])
        values: list[Any] = []
        gradients: list[Tensor | None] = [None] * len(inputs)
        types: list[torch.dtype | None] = []
        for result, parameters in self._results(calls, original):
            by = [parameters[names[id(tensor)]] if parameters else tensor for tensor in inputs]
            found: Sequence[Tensor | None] = [None] * len(by)
            if result.loss.requires_grad:
                with phase("backward"):
                    found = torch.autograd.grad(result.loss.sum(), by, allow_unused=True)
            if not parameters:
                result, found = in_front(result), in_front(found)
            share = torch.tensor(list(islice(of_tasks, len(result.loss))), dtype=torch.float64)
            types = types or leaf_dtypes(result)
            with phase("reduce"):
                values.append(optree.tree_map(lambda leaf, w=share: _sum(leaf, w), result))
                for place, gradient in enumerate(found):
                    if gradient is not None:
                        gradients[place] = _plus(gradients[place], _sum(gradient, share))
        none = all(gradient is None for gradient in gradients)
        total = optree.tree_map(lambda *parts: torch.stack(parts).sum(0), *values)
        return Answer(total, None if none else Gradients(0, gradients), types)


class EvaluateTasks(TaskMapper):
    """Mapper of evaluation: each task's figures, one by one."""

    def __call__(self, learner: Learner, batch: MetaBatch) -> dict[str, Tensor]:
        """Returns "loss" and the metrics, each of shape (tasks in the shard,), on the CPU."""
        return self.several([((learner, batch), {})])[0]

    @torch.no_grad()
    def several(self, calls: list[Call]) -> list[dict[str, Tensor]]:
        """See `Several`."""
        figures: list[dict[str, Tensor]] = []
        for result, parameters in self._results(calls, learner_and_batch(calls[0])[0].eval()):
            found = {"loss": result.loss, **result.metrics}
            figures.append(found if parameters else in_front(found))
        counts = [learner_and_batch(call)[1].count() for call in calls]
        joined = {n: torch.cat([f[n] for f in figures]).cpu().split(counts) for n in figures[0]}
        return [{n: parts[i] for n, parts in joined.items()} for i in range(len(calls))]


def learner_and_batch(call: Call) -> tuple[Learner, MetaBatch]:
    """What a mapper is called with."""

    def bound(learner: Learner, batch: MetaBatch) -> tuple[Learner, MetaBatch]:
        return learner, batch

    return bound(*call[0], **call[1])


def in_front(tree: Any) -> Any:
    """A single task's tensors as those of several: with a first dimension of one, detached."""
    return optree.tree_map(lambda leaf: leaf.detach().unsqueeze(0), tree)


def _sum(leaf: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum over tasks, (tasks, …) -> (…), in float64."""
    return torch.tensordot(weights.to(leaf.device), leaf.detach().double(), 1)


def _plus(total: Tensor | None, term: Tensor) -> Tensor:
    return term if total is None else total.add_(term)


def _generator(device: torch.device) -> torch.Generator:
    # torch.manual_seed would note a stack trace at each call for GPUs that are not in use.
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator


def _with_buffers(learner: Learner, episode: Episode) -> TaskResult:
    """The learner's result for a task, with what the task did to a copy of its buffers."""
    before = dict(learner.named_buffers())
    if not before:
        with told_apart(learner, episode):
            return learner(episode)
    clone = module_clone(learner, by="reference", detach_buffers=True)
    with told_apart(clone, episode):
        result = clone(episode)
    changes = {name: after.double() - before[name] for name, after in clone.named_buffers()}
    return result._replace(buffers=changes if learner.training else {})


def resolve_device(device: str) -> torch.device:
    """The device that a configured name stands for, in this process.

    Args:
        device: "auto" for the GPU of the local rank where there is one, else the CPU; or a name
            that torch knows.

    Raises:
        UserError: no such device here.
    """
    if device == "auto":
        if not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", get_local_rank() % torch.cuda.device_count())
    try:
        chosen = torch.device(device)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"device={device} cannot be used here ({reason}): take auto or cpu."
        ) from None
    return chosen


def _on_device(learner: Learner, device: torch.device) -> Learner:
    if all(parameter.device == device for parameter in learner.parameters()):
        return learner
    # A visit brings one learner for all its shards: it moves once.
    if learner not in _moved:
        _moved[learner] = module_clone(learner, by="reference", device=device)
    return _moved[learner].train(learner.training)


def _to(episode: Episode, device: torch.device) -> Episode:
    if device.type == "cpu":
        return episode
    return Episode(*(Examples(part.inputs.to(device), part.targets.to(device)) for part in episode))
