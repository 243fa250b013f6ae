"""The data of plots: curves of metrics, and the values of swept keys."""

import contextlib
import math
import string
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from metadist.metrics import counted, is_user_metric, score


class SettingData(NamedTuple):
    """One setting of a sweep; its runs differ only in their seed.

    Attributes:
        values: the values of the swept keys, in the order of the keys.
        mean: the mean of the test metric, accuracy (0 to 1) or MSE.
        ci95: half the width of the mean's 95% interval; None if it is unknown.
        best: whether this is the selected setting.
        seeds: the test metric of each run by the run's name; not needed by `plot_sweep`.
    """

    values: tuple[str, ...]
    mean: float
    ci95: float | None
    best: bool
    seeds: Mapping[str, float] = {}


def series(metrics: Sequence[Mapping[str, Any]], name: str) -> tuple[np.ndarray, np.ndarray]:
    """The iterations and values of a metric, sorted by iteration."""
    points = sorted(
        (int(record["iteration"]), number)
        for record in metrics
        if (number := _number(record.get(name))) is not None
    )
    iterations = np.array([iteration for iteration, _ in points], dtype=np.int64)
    return iterations, np.array([value for _, value in points], dtype=np.float64)


def _number(value: Any) -> float | None:
    """A number, also of a text such as "NaN"; None for other values, such as a callback's texts."""
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        return float(value)
    return None


def curve_names(metrics: Sequence[Mapping[str, Any]]) -> list[str]:
    """The metrics that have a curve: loss, accuracy or MSE, then those of the user's learner.

    Args:
        metrics: the metrics of a run.
    """
    prefixes = ("train_", "validation_")
    names = {
        name
        for record in metrics
        for name, value in record.items()
        if name.startswith(prefixes) and _number(value) is not None
    }
    measured = {name.partition("_")[2] for name in names}
    usual = [name for name in ("loss", "accuracy", "mse") if name in measured]
    return usual + sorted(filter(is_user_metric, measured))


def curve_labels(algorithm: Mapping[str, Any]) -> tuple[str, str]:
    """The labels of the curves of training and validation.

    They name the numbers of inner steps if these differ, because the losses then differ too.

    Args:
        algorithm: the node `algorithm` of the run's configuration.
    """
    inner, evaluated = algorithm.get("inner_steps"), algorithm.get("eval_inner_steps")
    if inner == evaluated or not (isinstance(inner, int) and isinstance(evaluated, int)):
        return "training", "validation"
    return (
        f"training ({counted(inner, 'inner step')})",
        f"validation ({counted(evaluated, 'inner step')})",
    )


def moving_average(values: np.ndarray, window: int) -> np.ndarray:
    """The mean of the finite values in a centered window; windows are shorter at the ends."""
    finite = np.isfinite(values)
    kernel = np.ones(min(window, len(values)))
    total = np.convolve(np.where(finite, values, 0.0), kernel, mode="same")
    count = np.convolve(finite.astype(np.float64), kernel, mode="same")
    mean = np.full_like(total, np.nan)
    np.divide(total, count, out=mean, where=count > 0.5)
    return mean


def validation_or_training(
    metrics: Sequence[Mapping[str, Any]], metric: str
) -> tuple[np.ndarray, np.ndarray, str]:
    """The curve of a validation metric, or else of the smoothed training metric, with a note.

    Returns:
        The iterations, the values, and a note for the label of a curve that is not of validation.
    """
    iterations, values = series(metrics, f"validation_{metric}")
    if len(iterations):
        return iterations, values, ""
    iterations, values = series(metrics, f"train_{metric}")
    if len(iterations):
        return iterations, moving_average(values, window=max(1, len(values) // 50)), ", training"
    return iterations, values, ", no metrics"


def class_letter(label: int) -> str:
    """The letter of a class of a task: A to Z, then AA, AB, …"""
    quotient, remainder = divmod(int(label), 26)
    return (class_letter(quotient - 1) if quotient else "") + string.ascii_uppercase[remainder]


def spread_over_classes(labels: np.ndarray, limit: int) -> np.ndarray:
    """Indices of at most `limit` examples, spread over the classes and sorted by class."""
    occurrence = np.zeros(len(labels), dtype=np.int64)
    for label in np.unique(labels):
        same_class = labels == label
        occurrence[same_class] = np.arange(same_class.sum())
    round_robin = np.lexsort((labels, occurrence))
    ways = len(np.unique(labels))
    if ways > limit:
        round_robin = round_robin[np.linspace(0, ways - 1, limit).round().astype(int)]
    selected = round_robin[:limit]
    return selected[np.argsort(labels[selected], kind="stable")]


def sort_values(values: Sequence[str]) -> list[str]:
    """The distinct values: numbers in ascending order, other values in order of appearance."""
    distinct = list(dict.fromkeys(values))
    return sorted(distinct, key=float) if all(map(is_number, distinct)) else distinct


def is_number(text: str) -> bool:
    """Whether a text is a number."""
    return _number(text) is not None


def sort_key(mean: float, metric: str) -> tuple[bool, float]:
    """A key that sorts means of accuracy or MSE, the best first and NaN last."""
    return math.isnan(mean), -score(mean, metric)


def short_names(keys: Sequence[str]) -> list[str]:
    """The last part of each dotted key if it is unique among the keys, else the whole key."""
    last = [key.rpartition(".")[2] for key in keys]
    return [name if last.count(name) == 1 else key for key, name in zip(keys, last, strict=True)]
