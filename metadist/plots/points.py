"""What plots are drawn from: curves of metrics, and the values of swept keys."""

import math
import string
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from metadist.metrics import score


class SettingData(NamedTuple):
    """The runs of one setting of a sweep, which differ in their seed.

    Attributes:
        values: of the swept keys, in their order.
        mean: of the test metric, accuracy (0 to 1) or MSE.
        ci95: half the width of its 95% interval; None if it is not known.
        best: whether it is the selected setting.
        seeds: the test metric of each run by its name; not needed by `plot_sweep`.
    """

    values: tuple[str, ...]
    mean: float
    ci95: float | None
    best: bool
    seeds: Mapping[str, float] = {}


def series(metrics: Sequence[Mapping[str, Any]], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Iterations and values of a metric, in order of the iterations."""
    points = sorted((int(each["iteration"]), float(each[name])) for each in metrics if name in each)
    iterations = np.array([iteration for iteration, _ in points], dtype=np.int64)
    return iterations, np.array([value for _, value in points], dtype=np.float64)


def moving_average(values: np.ndarray, window: int) -> np.ndarray:
    """The mean of the finite values in a centered window, which is shorter at the ends."""
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
    """Iterations and values of a metric in validation, else in training, smoothed; and a note."""
    iterations, values = series(metrics, f"validation_{metric}")
    if len(iterations):
        return iterations, values, ""
    iterations, values = series(metrics, f"train_{metric}")
    if len(iterations):
        return iterations, moving_average(values, window=max(1, len(values) // 50)), ", training"
    return iterations, values, ", no metrics"


def class_letter(label: int) -> str:
    """The letter that stands for a class of a task: A to Z, then AA, AB, …"""
    quotient, rest = divmod(int(label), 26)
    return (class_letter(quotient - 1) if quotient else "") + string.ascii_uppercase[rest]


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
    """Different values: numbers in ascending order, other values in their first order."""
    distinct = list(dict.fromkeys(values))
    return sorted(distinct, key=float) if all(map(is_number, distinct)) else distinct


def is_number(text: str) -> bool:
    """Whether a value is a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def sort_key(mean: float, metric: str) -> tuple[bool, float]:
    """Sorts the means of accuracy or MSE, the best first and NaN last."""
    return math.isnan(mean), -score(mean, metric)


def short_names(keys: Sequence[str]) -> list[str]:
    """The last part of each dotted key where no other key has the same, else the whole key."""
    last = [key.rpartition(".")[2] for key in keys]
    return [name if last.count(name) == 1 else key for key, name in zip(keys, last, strict=True)]
