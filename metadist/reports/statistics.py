"""Confidence intervals over runs or tasks."""

import math
import statistics
from collections.abc import Sequence


def mean_and_ci95(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean of a metric and half the width of its 95% confidence interval.

    The interval is Student's, t(0.975, n - 1) · s / √n with the sample standard deviation s: it
    assumes that the values are independent and normally distributed.

    Args:
        values: the metric's values, at least one, such as those of runs that differ only in their
            seed, or the differences of two runs' values on the same tasks.

    Returns:
        The mean and the half width. The half width is None for a single value and for values that
        are not all finite.

    Source: Student (1908), "The probable error of a mean", Biometrika 6(1).
    """
    count = len(values)
    if not all(map(math.isfinite, values)):
        return sum(values) / count, None
    mean = statistics.mean(values)
    if count < 2:
        return mean, None
    from scipy.special import stdtrit  # takes time to import

    # Not by `statistics.stdev`, which overflows for large values before Python 3.11.
    deviation = math.hypot(*(value - mean for value in values)) / math.sqrt(count - 1)
    return mean, float(stdtrit(count - 1, 0.975)) * deviation / math.sqrt(count)
