"""Predictions and targets of the queries of evaluated tasks, as tensors that strategies combine.

Tasks may have different numbers of queries, so the queries of all tasks are concatenated.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

QUERIES = "query.count"
PREDICTIONS = "query.predictions"
TARGETS = "query.targets"

QUERY_VALUES = (PREDICTIONS, TARGETS)
"""Values with a first dimension of queries; other values have a first dimension of tasks."""


class QueryPredictions(NamedTuple):
    """Predictions and targets of the queries of one task, on the CPU.

    Attributes:
        predictions: int64 classes of shape (n,), or values (n, outputs) for regression.
        targets: the targets, of the same type and shape.
    """

    predictions: Tensor
    targets: Tensor


def query_values(predictions: Tensor | None, targets: Tensor) -> dict[str, Tensor]:
    """Predictions and targets of the tasks' queries by the names above.

    Args:
        predictions: logits or values, shape (tasks, n, outputs).
        targets: int64 classes (tasks, n), or values (tasks, n, outputs) for regression.

    Returns:
        `QUERIES`, the number of queries of each task, shape (tasks,); `PREDICTIONS` and `TARGETS`,
        with a first dimension of all queries, with the predicted class instead of logits. They are
        empty if the learner returns no predictions or predictions of another shape.
    """
    if predictions is not None and not targets.is_floating_point() and predictions.dim() > 1:
        predictions = predictions.argmax(-1)
    if predictions is None or predictions.shape != targets.shape:
        targets = predictions = targets[:, :0]
    count = torch.full((len(targets),), targets.shape[1])
    return {
        QUERIES: count,
        PREDICTIONS: predictions.detach().flatten(0, 1),
        TARGETS: targets.flatten(0, 1),
    }


def split_queries(values: Mapping[str, Tensor]) -> list[QueryPredictions]:
    """Predictions and targets of each task; [] if the values contain none."""
    if QUERIES not in values:
        return []
    counts = values[QUERIES].tolist()
    parts = (values[name].split(counts) for name in QUERY_VALUES)
    return [QueryPredictions(*pair) for pair in zip(*parts, strict=True)]
