import math

import pytest

from metadist.metrics import (
    format_metric,
    format_number,
    format_percent,
    is_user_metric,
    metric_label,
    result_metric,
    score,
    task_metric,
)


@pytest.mark.parametrize(("metric", "best"), [("accuracy", 0.9), ("mse", 0.1), ("loss", 0.1)])
def test_the_better_value_has_the_larger_score(metric, best):
    assert max([0.1, 0.9, 0.5], key=lambda value: score(value, metric)) == best


def test_metric_of_a_problem():
    assert task_metric(regression=False) == "accuracy" and task_metric(regression=True) == "mse"
    assert result_metric({"test_loss": 0.5, "test_accuracy": 0.9}) == "accuracy"
    assert result_metric({"test_loss": 0.5, "test_mse": 0.5}) == "mse"


def test_format_metric():
    assert format_metric(0.98761, "accuracy") == "98.76%"
    assert format_metric(0.00123456, "mse") == "0.001235"
    assert format_metric(0.01, "accuracy", sign="+") == "+1.00%"
    assert format_metric(-0.5, "mse", sign="+") == "-0.5"
    assert format_metric(math.nan, "accuracy") == format_metric(math.nan, "mse") == "nan"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.0000"),
        (1.23456, "1.2346"),
        (-9999.5, "-9999.5000"),
        (10_000.0, "1.000e+04"),
        (-10_000.0, "-1.000e+04"),
    ],
)
def test_numbers(value, text):
    assert format_number(value) == text


def test_percentages():
    assert format_percent(0.125) == "12.50%" and format_percent(0.1236, 1) == "12.4%"
    assert format_percent(1.0) == "100.00%" and format_percent(0.25, 1) == "25.0%"


def test_labels():
    assert metric_label("mse") == "mean squared error" and metric_label("mse", short=True) == "MSE"
    assert metric_label("accuracy") == metric_label("accuracy", short=True) == "accuracy"
    assert metric_label("top_5") == "top 5"


def test_metrics_of_the_user():
    assert is_user_metric("top_5") and is_user_metric("before")
    assert not any(map(is_user_metric, ("loss", "mse", "ci95", "accuracy_before", "mse_after_3")))


def test_a_name_that_only_begins_like_a_step_of_the_inner_loop_is_the_users():
    assert is_user_metric("accuracy_before_calibration") and is_user_metric("mse_after_3_shots")
