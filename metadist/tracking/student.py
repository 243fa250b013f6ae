"""The mean of few measurements, and how well they settle it."""

import math
from collections.abc import Sequence


def mean_and_interval(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean of some runs' figures and half the width of its 95% interval.

    The interval is Student's, t(0.975, n - 1) · s / √n with the sample's standard deviation s:
    runs that differ in nothing but their seed are taken for independent and normal.

    Returns:
        Mean and half width; None for the width of a single value, which settles nothing, and of
        values that are not all finite.

    Source: Student (1908), "The probable error of a mean", Biometrika 6(1).
    """
    mean = math.fsum(values) / len(values)
    count = len(values)
    if count < 2 or not math.isfinite(mean):
        return mean, None
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1))
    return mean, student_quantile(count - 1) * deviation / math.sqrt(count)


def student_quantile(freedom: int, share: float = 0.95) -> float:
    """T such that a share of Student's distribution lies between -t and t.

    Args:
        freedom: its degrees of freedom, at least 1.
        share: above 0 and below 1.
    """
    low, high = 0.0, 1.0
    while _share_within(high, freedom) < share:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _share_within(middle, freedom) < share else (low, middle)
    return (low + high) / 2


def _share_within(t: float, freedom: int) -> float:
    """The share of the distribution between -t and t, by the finite series in the angle.

    Source: Abramowitz and Stegun, "Handbook of Mathematical Functions", 26.7.3 and 26.7.4.
    """
    angle = math.atan(t / math.sqrt(freedom))
    square = math.cos(angle) ** 2
    odd = freedom % 2 == 1
    term = total = 1.0 if freedom > 1 else 0.0
    for number in range(3 if odd else 2, freedom - 1, 2):
        term *= square * (number - 1) / number
        total += term
    if odd:
        return 2 / math.pi * (angle + math.sin(angle) * math.cos(angle) * total)
    return math.sin(angle) * total
