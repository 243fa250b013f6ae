"""Student's interval against a table in print, and against scipy where it is installed."""

import math

import pytest

from metadist.tracking import mean_and_interval
from metadist.tracking.student import student_quantile

# Fisher and Yates, "Statistical Tables", table III, p = 0.05.
PRINTED = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 9: 2.262, 30: 2.042, 120: 1.980}


@pytest.mark.parametrize(("freedom", "printed"), PRINTED.items())
def test_the_quantile_is_the_printed_one(freedom, printed):
    assert student_quantile(freedom) == pytest.approx(printed, abs=6e-4)


def test_the_quantile_is_scipys():
    stats = pytest.importorskip("scipy.stats")
    for freedom in (1, 2, 3, 4, 7, 28, 61):
        assert student_quantile(freedom, 0.9) == pytest.approx(stats.t.ppf(0.95, freedom), rel=1e-9)


def test_the_interval_of_three_values():
    mean, half = mean_and_interval([0.8, 0.9, 1.0])
    assert mean == pytest.approx(0.9)
    assert half == pytest.approx(4.302653 * 0.1 / math.sqrt(3), rel=1e-6)


def test_what_settles_nothing_has_no_interval():
    assert mean_and_interval([0.5]) == (0.5, None)
    assert mean_and_interval([0.5, math.nan])[1] is None
