"""The built-in metrics: which values are better, and how values are formatted."""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Literal

METRIC_MODES: Mapping[str, Literal["min", "max"]] = {"accuracy": "max", "loss": "min", "mse": "min"}
"""Whether larger ("max") or smaller ("min") values of a metric are better."""

BUILTIN_METRICS = (*METRIC_MODES, "ci95")
"""Metrics of a training step or an evaluation that metadist computes itself."""

RESERVED_METRICS = frozenset(
    {
        *BUILTIN_METRICS,
        *("tasks", "gradient_norm", "learning_rate", "non_finite", "samples_per_second"),
        *("seconds", "iteration", "tasks_per_second"),
        *("task", "classes", "query_images", "labels", "predictions", "targets"),
    }
)
"""Names that metadist logs itself. Logging services show both `gradient_norm` and a learner's
`train_gradient_norm` as `train/gradient_norm`. The last line: fields of a task's predictions."""

_STEP_METRIC = re.compile(r".+_(before|after_\d+)")


def task_metric(regression: bool) -> Literal["accuracy", "mse"]:
    """The metric of validation and test: MSE for regression, accuracy for classification."""
    return "mse" if regression else "accuracy"


def result_metric(results: Iterable[str]) -> Literal["accuracy", "mse"]:
    """The metric of validation and test, inferred from the names in `results.json`."""
    return task_metric("test_mse" in results)


def is_user_metric(name: str) -> bool:
    """Whether a metric comes from the user's learner.

    Args:
        name: the metric's name, without a prefix such as `train_`.
    """
    return name not in BUILTIN_METRICS and not _STEP_METRIC.fullmatch(name)


def is_percentage(metric: str) -> bool:
    """Whether a metric has values from 0 to 1 that are formatted as percentages."""
    return metric == "accuracy"


def larger_is_better(metric: str) -> bool:
    """Whether larger values of accuracy, loss or MSE are better."""
    return METRIC_MODES[metric] == "max"


def score(value: float, metric: str) -> float:
    """The value, negated where smaller values are better, so that a larger score is better."""
    return value if larger_is_better(metric) else -value


def metric_label(metric: str, short: bool = False) -> str:
    """The name of a metric for display: "mean squared error", or "MSE" if `short`."""
    if metric == "mse":
        return "MSE" if short else "mean squared error"
    return metric.replace("_", " ")


def format_number(value: float) -> str:
    """A number with four decimals, or in scientific notation from 10,000."""
    return f"{value:.4f}" if abs(value) < 10_000 else f"{value:.3e}"


def counted(count: int, noun: str) -> str:
    """A count with its noun, such as "1 worker" or "2 workers"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def format_percent(fraction: float, decimals: int = 2) -> str:
    """A fraction of 1 as a percentage."""
    return f"{100 * fraction:.{decimals}f}%"


def format_metric(value: float, metric: str, sign: Literal["", "+"] = "") -> str:
    """Format a value for a table or a report: as a percentage with two decimals, or with four
    significant digits.

    Args:
        value: the metric's value.
        metric: the metric's name.
        sign: "+" to write the sign of positive values too.
    """
    if is_percentage(metric) and math.isfinite(value):
        return f"{100 * value:{sign}.2f}%"
    return f"{value:{sign}.4g}"


def format_estimate(mean: float, ci95: float | None, metric: str) -> str:
    """Format a mean and half the width of its 95% interval, if both are finite.

    Args:
        mean: the mean of a metric.
        ci95: half the width; None or NaN if there is none, as for a single task.
        metric: the metric's name.
    """
    text = format_metric(mean, metric)
    if ci95 is None or not (math.isfinite(ci95) and math.isfinite(mean)):
        return text
    return f"{text} ± {format_metric(ci95, metric)}"
