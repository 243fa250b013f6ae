"""Metrics as text for the console."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from metadist.metrics import counted, format_number, format_percent, is_user_metric, metric_label

_MAX_STEPS_SHOWN = 10


def is_validation(metrics: Mapping[str, Any]) -> bool:
    """Whether the metrics are from a validation rather than from a training iteration."""
    return any(name.startswith("validation_") for name in metrics)


def format_duration(seconds: float) -> str:
    """Hours, minutes and seconds, preceded by days if there are any."""
    minutes, second = divmod(int(seconds + 0.5), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{f'{days}d ' if days else ''}{hour}:{minute:02}:{second:02}"


def format_throughput(values: Mapping[str, Any]) -> str:
    """Samples per second if `values` has them, else tasks per second."""
    unit = "samples" if "samples_per_second" in values else "tasks"
    speed = values[f"{unit}_per_second"]
    digits = 0 if speed >= 100 else 1 if speed >= 1 else 3
    return f"{speed:.{digits}f} {unit}/s"


def format_training(metrics: Mapping[str, Any]) -> list[str]:
    """Format a training iteration: loss, accuracy or MSE, throughput and the learner's metrics.

    Metrics that are missing are left out. Accuracies have a fixed width so that a progress bar does
    not move.
    """
    parts = []
    if "train_loss" in metrics:
        parts.append(f"loss {format_number(metrics['train_loss'])}")
    if "train_accuracy" in metrics:
        parts.append(f"accuracy {format_percent(metrics['train_accuracy'], 1):>6}")
    elif "train_mse" in metrics:
        parts.append(f"MSE {format_number(metrics['train_mse'])}")
    if "tasks_per_second" in metrics:
        parts.append(format_throughput(metrics))
    return parts + format_user_metrics(metrics, "train")


def format_validation(metrics: Mapping[str, Any]) -> str:
    """The metrics of a validation in one line."""
    parts = []
    ci95 = metrics.get("validation_ci95")
    if "validation_accuracy" in metrics:
        value = _with_interval(metrics["validation_accuracy"], ci95, format_percent)
        parts.append(f"accuracy {value}")
    if "validation_mse" in metrics:
        parts.append(f"MSE {_with_interval(metrics['validation_mse'], ci95, format_number)}")
    if "validation_loss" in metrics:
        parts.append(f"loss {format_number(metrics['validation_loss'])}")
    return "validation " + ", ".join(parts + format_user_metrics(metrics, "validation"))


def summarize_results(results: Mapping[str, Any], tested: str = "") -> list[tuple[str, str]]:
    """The results of a run as rows of label and text; missing results are left out.

    Args:
        results: the content of `results.json`.
        tested: a description of what is tested, if the name of the split does not say it.
    """
    rows = []
    for metric, text in (("accuracy", format_percent), ("mse", format_number)):
        if f"test_{metric}" not in results:
            continue
        value = _with_interval(results[f"test_{metric}"], results.get("ci95"), text)
        tasks = ""
        if "test_tasks" in results:
            tasks = f" over {counted(results['test_tasks'], 'task')}"
        tasks += f" ({tested})" if tested else ""
        rows.append((f"test {metric_label(metric, short=True)}", value + tasks))
        if f"test_{metric}_before" in results:
            rows.append(("before adaptation", text(results[f"test_{metric}_before"])))
        if by_steps := results.get(f"test_{metric}_by_steps"):
            rows.append(("after each step", _format_steps(by_steps, text)))
    if user_metrics := format_user_metrics(results, "test"):
        rows.append(("test metrics", ", ".join(user_metrics)))
    if "train_loss" in results:
        done = results.get("iterations")
        after = "" if done is None else f" after {counted(done, 'iteration')}"
        rows.append(("training loss", format_number(results["train_loss"]) + after))
    if "wall_seconds" in results:
        rows.append(("time", format_duration(results["wall_seconds"])))
    if "tasks_per_second" in results:
        workers = ""
        if "strategy" in results and "world_size" in results:
            workers = f", {results['strategy']} on {counted(results['world_size'], 'worker')}"
        rows.append(("speed", format_throughput(results) + workers))
    return rows


def format_user_metrics(values: Mapping[str, Any], split: str) -> list[str]:
    """The names and values of the metrics that the user's learner adds."""
    return [
        f"{metric} {format_number(value)}"
        for name, value in values.items()
        if name.startswith(f"{split}_") and isinstance(value, float)
        if is_user_metric(metric := name.removeprefix(f"{split}_"))
    ]


def _with_interval(value: float, ci95: float | None, text: Callable[[float], str]) -> str:
    if ci95 is None or not math.isfinite(ci95):  # a single task has no interval
        return text(value)
    return f"{text(value)} ± {text(ci95)}"


def _format_steps(rows: Sequence[Mapping[str, float]], text: Callable[[float], str]) -> str:
    """The test metric after each inner step; the first steps and the last one if there are many."""
    values = [text(row["mean"]) for row in rows if row["steps"]]
    if len(values) > _MAX_STEPS_SHOWN:
        values = [*values[: _MAX_STEPS_SHOWN - 1], "…", values[-1]]
    return ", ".join(values)
