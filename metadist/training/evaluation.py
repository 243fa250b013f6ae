"""Judging a learner on a fixed list of tasks."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from metadist.algorithms import Learner
from metadist.training.mappers import EvaluateTasks, MetaBatch
from metadist.training.strategies import Strategy

_CHUNK = 64


class Estimate(NamedTuple):
    """A mean over tasks with its 95% interval.

    Attributes:
        mean: the mean.
        ci95: half the width of the interval, 1.96 standard errors.
        tasks: over how many tasks.
    """

    mean: float
    ci95: float
    tasks: int


def estimate(values: Tensor) -> Estimate:
    """The mean of one figure over tasks, shape (tasks,)."""
    count = values.numel()
    values = values.double()
    spread = values.std().item() if count > 1 else math.nan
    return Estimate(values.mean().item(), 1.96 * spread / math.sqrt(count), count)


def evaluate(
    strategy: Strategy,
    mapper: EvaluateTasks,
    learner: Learner,
    keys: Tensor,
    make_batch: Callable[[Tensor], MetaBatch],
    between: Callable[[], None] = lambda: None,
    warn: Callable[[int, float], None] = lambda place, loss: None,
) -> dict[str, Estimate]:
    """The figures of the tasks `keys`, of shape (tasks, 4), each with its interval.

    Called by the ranks that run the loop. Every learner that is given the same keys is judged
    on the same tasks.

    Args:
        strategy: carries it out.
        mapper: draws the tasks and runs the learner on them.
        learner: what is judged.
        keys: the fixed list.
        make_batch: what travels for some keys.
        between: called every so many tasks; what it raises ends the evaluation.
        warn: called if any task's loss is NaN or infinite, with the first one's place in `keys`
            and its loss.
    """
    parts = []
    for chunk in keys.split(_CHUNK):
        parts.append(strategy.collect(mapper, learner, make_batch(chunk)))
        between()
    figures = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    wrong = (~figures["loss"].isfinite()).nonzero()
    if len(wrong):
        warn(int(wrong[0]), figures["loss"][wrong[0]].item())
    return {name: estimate(values) for name, values in figures.items()}
