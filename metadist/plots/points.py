"""What plots are drawn from: curves of metrics, and the values of swept keys."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from metadist.metrics import score


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
