"""Student's interval against a printed table."""

import math

import pytest

from metadist.reports import mean_and_ci95

# Fisher and Yates, "Statistical Tables", table III, p = 0.05, by degrees of freedom.
PRINTED = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 9: 2.262, 30: 2.042, 120: 1.980}


@pytest.mark.parametrize(("freedom", "printed"), PRINTED.items())
def test_the_interval_is_by_the_printed_quantile(freedom, printed):
    count = freedom + 1
    values = [0.0] * (count - 1) + [1.0]  # of mean 1 / n and variance 1 / n
    mean, half = mean_and_ci95(values)
    assert mean == pytest.approx(1 / count)
    assert half * count == pytest.approx(printed, abs=6e-4)


def test_the_interval_of_three_values():
    mean, half = mean_and_ci95([0.8, 0.9, 1.0])
    assert mean == pytest.approx(0.9)
    assert half == pytest.approx(4.302653 * 0.1 / math.sqrt(3), rel=1e-6)


def test_single_or_non_finite_values_have_no_interval():
    assert mean_and_ci95([0.5]) == (0.5, None)
    assert mean_and_ci95([0.5, math.nan])[1] is None
    assert mean_and_ci95([math.inf, 0.5]) == (math.inf, None)
    assert mean_and_ci95([math.inf, -math.inf])[1] is None


def test_large_values_have_an_interval():
    mean, half = mean_and_ci95([1e200, 2e200])
    assert mean == pytest.approx(1.5e200)
    assert half == pytest.approx(12.7062 * 0.5e200, rel=1e-5)
