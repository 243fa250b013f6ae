"""Evaluation of a learner on a fixed list of tasks."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from metadist.algorithms import Learner
from metadist.distributed import get_world_size
from metadist.training.query_predictions import (
    QUERIES,
    QUERY_VALUES,
    QueryPredictions,
    split_queries,
)
from metadist.training.strategies.strategy import Strategy
from metadist.training.task_mapper import TASK_INDEX, EvaluateMapper, MetaBatch, order_of_tasks

_MIN_TASKS_PER_CALL = 64
"""The smallest number of tasks per call of `Strategy.map_tasks`, except the last one."""

_MIN_TASKS_PER_WORKER = 8
"""The smallest number of tasks per worker and call."""

_NO_METRICS = (TASK_INDEX, QUERIES, *QUERY_VALUES)
"""Values of a mapper's result that are not metrics."""


class Estimate(NamedTuple):
    """A mean over tasks with its 95% interval.

    Attributes:
        mean: the mean.
        ci95: half the width of the interval, 1.96 standard errors; NaN for a single task.
        tasks: the number of tasks.
    """

    mean: float
    ci95: float
    tasks: int


class Evaluation(NamedTuple):
    """The result of a learner on a list of tasks.

    Attributes:
        metrics: "loss" and the metrics, each of shape (tasks,), on the CPU.
        predictions: predictions and targets of each task's queries; empty without
            `EvaluateMapper.return_predictions`.
    """

    metrics: dict[str, Tensor]
    predictions: list[QueryPredictions]

    @property
    def estimates(self) -> dict[str, Estimate]:
        """Mean and interval of loss and metrics over the tasks."""
        return {name: estimate(values) for name, values in self.metrics.items()}


def estimate(values: Tensor) -> Estimate:
    """Mean and interval of values over tasks, shape (tasks,)."""
    count = values.numel()
    values = values.double()
    spread = values.std().item() if count > 1 else math.nan
    return Estimate(values.mean().item(), 1.96 * spread / math.sqrt(count), count)


def evaluate(
    strategy: Strategy,
    mapper: EvaluateMapper,
    learner: Learner,
    keys: Tensor,
    make_batch: Callable[[Tensor], MetaBatch],
    between_calls: Callable[[], None] = lambda: None,
) -> Evaluation:
    """Compute loss and metrics of a learner on tasks.

    The drivers call it. For the same keys, every learner is evaluated on the same tasks.

    Args:
        strategy: the strategy that distributes the tasks.
        mapper: the mapper that samples the tasks and runs the learner on them.
        learner: the learner to evaluate.
        keys: the tasks' keys, shape (tasks, 4).
        make_batch: a function, keys -> the batch that is sent to workers.
        between_calls: a function that is called after each call of the strategy; an exception in it
            ends the evaluation.
    """
    parts: list[dict[str, Tensor]] = []
    predictions: list[QueryPredictions] = []
    per_call = max(_MIN_TASKS_PER_CALL, _MIN_TASKS_PER_WORKER * get_world_size())
    for call_keys in keys.split(per_call):
        values = strategy.map_tasks(mapper, learner, make_batch(call_keys))
        order = order_of_tasks(values[TASK_INDEX], call_keys)
        parts.append({n: value[order] for n, value in values.items() if n not in _NO_METRICS})
        if queries := split_queries(values):
            predictions += [queries[position] for position in order.tolist()]
        between_calls()
    metrics = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return Evaluation(metrics, predictions)
