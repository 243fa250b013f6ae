"""The mappers of meta-learning: what a worker does with its part of a meta-batch."""

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from metadist.algorithms import Learner, TaskResult
from metadist.distributed import get_local_rank, module_clone
from metadist.distributed.residents import Resident
from metadist.errors import UserError
from metadist.tasks import Episode, Examples

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


@dataclass(frozen=True)
class TaskMapper:
    """Runs a learner on tasks. It crosses to other workers as names and settings alone.

    Attributes:
        tasks: the worker's own `TaskDistribution`.
        device: where the learner computes; "auto" is the GPU of the local rank, else the CPU.
    """

    tasks: Resident
    device: str = "auto"

    def each(self, learner: Learner, batch: MetaBatch) -> list[TaskResult]:
        """The results of the batch's tasks, in order.

        Each task starts from the learner's buffers as they came, and from a random state of its
        own (for dropout), so that its result depends on nothing but its key.
        """
        device = resolve_device(self.device)
        learner = _on_device(learner, device)
        results = []
        for key, episode in self._tasks(batch):
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                _generator(device).manual_seed(hash(tuple(key.tolist())))
                results.append(_with_buffers(learner, _to(episode, device)))
        return results

    def _tasks(self, batch: MetaBatch) -> Iterator[tuple[Tensor, Episode]]:
        single = batch.keys.dim() == 1
        for place, key in enumerate(batch.keys.unsqueeze(0) if single else batch.keys):
            if batch.episodes is None:
                yield key, self.tasks.value.draw(key)
            elif single:
                yield key, batch.episodes
            else:
                parts = (Examples(p.inputs[place], p.targets[place]) for p in batch.episodes)
                yield key, Episode(*parts)


class TrainTasks(TaskMapper):
    """Mapper of training: the mean loss and metrics of the tasks in a shard."""

    def __call__(self, learner: Learner, batch: MetaBatch) -> TaskResult:
        """Returns a `TaskResult` whose loss can be differentiated."""
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


class EvaluateTasks(TaskMapper):
    """Mapper of evaluation: each task's figures, one by one."""

    @torch.no_grad()
    def __call__(self, learner: Learner, batch: MetaBatch) -> dict[str, Tensor]:
        """Returns "loss" and the metrics, each of shape (tasks in the shard,), on the CPU."""
        results = self.each(learner.eval(), batch)
        figures = [{"loss": result.loss, **result.metrics} for result in results]
        return {
            name: torch.stack([figure[name] for figure in figures]).cpu() for name in figures[0]
        }


def _generator(device: torch.device) -> torch.Generator:
    # torch.manual_seed would note a stack trace at each call for GPUs that are not in use.
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator


def _with_buffers(learner: Learner, episode: Episode) -> TaskResult:
    """The learner's result for a task, with what the task did to a copy of its buffers."""
    before = dict(learner.named_buffers())
    if not before:
        return learner(episode)
    clone = module_clone(learner, by="reference", detach_buffers=True)
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
