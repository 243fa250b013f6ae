"""Metrics as text."""

import math

import pytest

from metadist.loggers.formatting import (
    format_duration,
    format_throughput,
    format_training,
    format_validation,
    is_validation,
    summarize_results,
)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0:00:00"),
        (0.6, "0:00:01"),
        (59.6, "0:01:00"),
        (3599, "0:59:59"),
        (3600, "1:00:00"),
        (90061, "1d 1:01:01"),
    ],
)
def test_durations(seconds, text):
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("speed", "text"),
    [
        (1234.5, "1234 tasks/s"),
        (100.0, "100 tasks/s"),
        (99.94, "99.9 tasks/s"),
        (1.0, "1.0 tasks/s"),
        (0.25, "0.250 tasks/s"),
    ],
)
def test_throughput(speed, text):
    assert format_throughput({"tasks_per_second": speed}) == text
    both = {"tasks_per_second": 7.0, "samples_per_second": speed}
    assert format_throughput(both) == text.replace("tasks", "samples")


def test_training_and_validation():
    assert format_training({"iteration": 1}) == []
    classes = {"train_loss": 0.5, "train_accuracy": 0.25, "tasks_per_second": 3.0}
    assert format_training(classes) == ["loss 0.5000", "accuracy  25.0%", "3.0 tasks/s"]
    assert format_training({"train_mse": 2.0}) == ["MSE 2.0000"]
    assert format_validation({"validation_accuracy": 0.5}) == "validation accuracy 50.00%"
    waves = {"validation_mse": 2.0, "validation_ci95": 0.5, "validation_loss": 3.0}
    assert format_validation(waves) == "validation MSE 2.0000 ± 0.5000, loss 3.0000"
    of_one_task = {"validation_accuracy": 0.5, "validation_ci95": math.nan}
    assert format_validation(of_one_task) == "validation accuracy 50.00%"
    assert is_validation(waves) and not is_validation(classes)


def test_summary_of_results():
    assert summarize_results({}) == []
    results = {
        "test_mse": 2.0,
        "test_tasks": 3,
        "train_loss": 1.0,
        "iterations": 4,
        "tasks_per_second": 5.0,
        "strategy": "local",
        "world_size": 1,
        "wall_seconds": 61.0,
    }
    assert summarize_results(results) == [
        ("test MSE", "2.0000 over 3 tasks"),
        ("training loss", "1.0000 after 4 iterations"),
        ("time", "0:01:01"),
        ("speed", "5.0 tasks/s, local on 1 worker"),
    ]
