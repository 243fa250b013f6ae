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
    from scipy.special import stdtrit  # here, for runs without a sweep do not need it

    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1))
    return mean, float(stdtrit(count - 1, 0.975)) * deviation / math.sqrt(count)
