"""Tasks of one shape side by side: one computation, with a dimension that counts tasks in front.

A small task's time goes to starting operations. Side by side, tasks share that cost, and each
keeps its own parameters and its own gradient, to the bit the same however many run together.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Literal

import optree
import torch
from torch import Tensor
from torch.func import functional_call

from metadist.algorithms import Learner, TaskResult
from metadist.tasks import Episode
from metadist.training.task_phases import told_apart

TasksAtOnce = int | Literal["auto"]

# Numbers in the inputs of tasks that run together, of models that do not say it themselves.
_NUMBERS = 2**16
_NUMBERS_OFF_CPU = 2**22
_FEWEST = 3
"""With fewer tasks side by side than these a CPU is faster one by one."""


def tasks_at_once(learner: Learner, episode: Episode, asked: TasksAtOnce) -> int:
    """How many tasks like this one run side by side, 0 for tasks that run one by one.

    It depends on the learner and the task's shape alone, never on the number of tasks: all ranks
    take the same way through the model, and so round alike.

    Args:
        learner: on its device.
        episode: one task.
        asked: a number, or "auto".
    """
    if not learner.side_by_side or any(True for _ in learner.buffers()):
        return 0
    if asked != "auto":
        return asked
    numbers = sum(part.inputs.numel() for part in episode)
    on_cpu = episode.query.inputs.device.type == "cpu"
    room = getattr(learner.model, "numbers_side_by_side", _NUMBERS) if on_cpu else _NUMBERS_OFF_CPU
    fitting = min(64, room // max(1, numbers))
    return fitting if fitting >= _FEWEST else 0


def groups(
    learner: Learner, tasks: Iterable[tuple[Tensor, Episode]], count: int, asked: TasksAtOnce
) -> Iterator[tuple[bool, list[tuple[Tensor, Episode]]]]:
    """The tasks in order, in groups to run together, whose sizes differ by at most one.

    Args:
        learner: on its device.
        tasks: keys and episodes.
        count: how many there are.
        asked: how many shall run together.

    Yields:
        Whether to run the group with `together`, and the group; if not, it is a single task.
    """
    group: list[tuple[Tensor, Episode]] = []
    shapes, most, size = None, 0, 1
    for number, (key, episode) in enumerate(tasks):
        found = [tensor.shape for tensor in optree.tree_leaves(episode)]
        if found != shapes or len(group) == size:
            if group:
                yield most > 0, group
            group, shapes, most = [], found, tasks_at_once(learner, episode, asked)
            left = max(1, count - number)
            size = math.ceil(left / math.ceil(left / max(1, most)))
        group.append((key, episode))
    if group:
        yield most > 0, group


def together(learner: Learner, episodes: list[Episode]) -> tuple[TaskResult, dict[str, Tensor]]:
    """Run tasks side by side.

    Args:
        learner: with `side_by_side`.
        episodes: of one shape.

    Returns:
        The result, everything in it with a first dimension that counts tasks; and each task's
        own parameters, by name, to differentiate the sum of the losses by.
    """
    parameters = {
        name: _repeated(parameter.detach(), len(episodes)).requires_grad_(parameter.requires_grad)
        for name, parameter in learner.named_parameters()
    }
    stacked = optree.tree_map(lambda *parts: torch.stack(parts), *episodes)
    with told_apart(learner, stacked):
        return functional_call(learner, parameters, (stacked,)), parameters


def _repeated(parameter: Tensor, tasks: int) -> Tensor:
    """A copy of a parameter for each task, (tasks, *shape).

    Copies and no views: an operation that needs contiguous memory would copy a view of several
    tasks, but not that of one, and the order in which autograd adds gradients up would then depend
    on the number of tasks. Weights of convolutions have channels last, as their products read them.
    """
    if parameter.dim() != 4:
        return parameter.repeat(tasks, *(1,) * parameter.dim())
    return parameter.permute(0, 2, 3, 1).repeat(tasks, 1, 1, 1, 1).permute(0, 1, 4, 2, 3)
