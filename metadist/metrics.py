"""The metrics that metadist has names for: which values are better, and how they are written."""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Literal

METRIC_MODES: Mapping[str, Literal["min", "max"]] = {"accuracy": "max", "loss": "min", "mse": "min"}
"""Whether the larger or the smaller of two values of a metric is the better one."""

BUILTIN_METRICS = (*METRIC_MODES, "ci95")
"""Metrics of a training step or an evaluation that metadist computes itself."""

RESERVED_METRICS = frozenset(
    {
        *BUILTIN_METRICS,
        *("tasks", "gradient_norm", "learning_rate", "non_finite", "samples_per_second"),
        *("seconds", "iteration", "tasks_per_second"),
    }
)
"""Names that metadist logs itself: services group `gradient_norm`, like the learner's
`train_gradient_norm`, as `train/gradient_norm`."""

_OF_A_STEP = re.compile(r".+_(before|after_\d+)")
_LABELS = {"mse": "mean squared error"}
_SHORT_LABELS = {"mse": "MSE"}


def task_metric(regression: bool) -> Literal["accuracy", "mse"]:
    """The metric of validation and test: that of classification, or of regression."""
    return "mse" if regression else "accuracy"


def result_metric(results: Iterable[str]) -> Literal["accuracy", "mse"]:
    """The metric of validation and test, by the names in `results.json`."""
    return task_metric("test_mse" in results)


def is_user_metric(name: str) -> bool:
    """Whether the user's learner adds this metric; its name is without `train_` and the like."""
    return name not in BUILTIN_METRICS and not _OF_A_STEP.fullmatch(name)


def is_percentage(metric: str) -> bool:
    """Whether a metric from 0 to 1 is written in percent."""
    return metric == "accuracy"


def larger_is_better(metric: str) -> bool:
    """Whether a run with a larger value of accuracy, loss or MSE is the better one."""
    return METRIC_MODES[metric] == "max"


def score(value: float, metric: str) -> float:
    """The value, or its negative: the larger score is the better one."""
    return value if larger_is_better(metric) else -value


def metric_label(metric: str, short: bool = False) -> str:
    """The name of a metric in a text: "mean squared error", or "MSE" if `short`."""
    labels = _SHORT_LABELS if short else _LABELS
    return labels.get(metric, metric.replace("_", " "))


def format_number(value: float) -> str:
    """Four decimals, or scientific notation from 10,000."""
    return f"{value:.4f}" if abs(value) < 10_000 else f"{value:.3e}"


def format_percent(fraction: float, decimals: int = 2) -> str:
    """A fraction of 1 as a percentage."""
    return f"{100 * fraction:.{decimals}f}%"


def format_metric(value: float, metric: str, sign: Literal["", "+"] = "") -> str:
    """A value in a table or a report: a percentage with two decimals, or four digits.

    Args:
        value: of the metric.
        metric: its name.
        sign: "+" writes the sign of a positive value too.
    """
    if is_percentage(metric) and math.isfinite(value):
        return f"{100 * value:{sign}.2f}%"
    return f"{value:{sign}.4g}"
