"""The HTML report on one run, made only from the files in its directory."""

import contextlib
import math
import shlex
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from metadist import __version__
from metadist.files import read_regular
from metadist.loggers import flatten_values
from metadist.loggers.formatting import format_duration, format_user_metrics
from metadist.metrics import counted, format_metric, format_number, metric_label
from metadist.plots import (
    Figure,
    confusion_matrix,
    learning_curve,
    metric_by_steps,
    regression_task,
    task_histogram,
    time_bar,
    training_curve,
)
from metadist.plots.points import class_letter, curve_names
from metadist.reports.html_document import write_html
from metadist.reports.published_comparison import compare_with_published
from metadist.reports.run_directory import HTML_FILE, PROFILE_DIRECTORY, trust_option
from metadist.reports.run_record import RunRecord, format_time, read_run_record

_HARDEST = 10
_MATRIX_CLASSES = 40
_CONFUSED_PAIRS = 12


def write_run_report(directory: Path) -> Path:
    """Write `report.html` into a run directory. One process calls it, at any time.

    Returns:
        The path of the file.

    Raises:
        UserError: the directory is no run directory, a file in it cannot be read, or the report
            cannot be written.
    """
    record, now = read_run_record(directory), time.time()
    figures = run_figures(record)
    return write_html(
        directory / HTML_FILE, "run.html.jinja", _context(record, figures, now), figures
    )


def run_figures(record: RunRecord) -> dict[str, Figure]:
    """The figures of a report by the id of their HTML element."""
    results, metrics, metric = record.results or {}, record.metrics, record.metric
    names = {name for line in metrics for name in line}
    node = record.config.get("algorithm")
    algorithm = node if isinstance(node, Mapping) else {}
    figures: dict[str, Figure] = {}
    for name in curve_names(metrics):
        test = None
        if name == metric and f"test_{metric}" in results:
            ci95 = results.get("ci95")
            test = float(results[f"test_{metric}"]), math.nan if ci95 is None else float(ci95)
        figures[f"curve-{name}"] = learning_curve(metrics, name, test, name == metric, algorithm)
    for name, label, logarithmic in (
        ("gradient_norm", "gradient norm", True),
        ("learning_rate", "learning rate", False),
    ):
        if name in names:
            figures[f"curve-{name}"] = training_curve(metrics, name, label, logarithmic)
    if rows := results.get(f"test_{metric}_by_steps"):
        figures["steps"] = metric_by_steps(rows, metric)
    if values := record.task_values():
        figures["histogram"] = task_histogram(values, metric)
    confusions = count_confusions(record.predictions)
    classes = sorted({name for pair in confusions for name in pair})
    if classes and len(classes) <= _MATRIX_CLASSES:
        counts = [[confusions[true, predicted] for predicted in classes] for true in classes]
        figures["confusions"] = confusion_matrix(classes, counts)
    if seconds := record.seconds():
        figures["time"] = time_bar(seconds)
        speed = "samples_per_second" if "samples_per_second" in names else "tasks_per_second"
        if speed in names:
            figures["speed"] = training_curve(metrics, speed, speed.replace("_per_second", "/s"))
    by_number = {prediction["task"]: prediction for prediction in record.predictions}
    for kind, tasks in record.test_tasks.items():
        for task in tasks:
            predicted = by_number.get(task["task"], {})
            if _has_curve(task, predicted):
                figures[f"task-{kind}-{task['task']}"] = _regression_figure(task, predicted)
    return figures


def _has_curve(task: Mapping[str, Any], predicted: Mapping[str, Any]) -> bool:
    """Whether a regression task has a target and a prediction for each input."""
    count = len(task.get("inputs", ()))
    rows = [predicted.get(name) or [] for name in ("targets", "predictions")]
    return count > 0 and all(len(each) == count and all(each) for each in rows)


def _regression_figure(task: Mapping[str, Any], predicted: Mapping[str, Any]) -> Figure:
    inputs = task["inputs"]
    order = sorted(range(len(inputs)), key=inputs.__getitem__)
    targets, after = (
        [float(row[0]) for row in predicted[name]] for name in ("targets", "predictions")
    )
    sorted_ = [
        [values[index] for index in order if values]
        for values in (inputs, targets, task["before"], after)
    ]
    return regression_task(task["support"], *sorted_)


def count_confusions(predictions: Sequence[Mapping[str, Any]]) -> Counter[tuple[str, str]]:
    """Count queries by the names of their true and their predicted class.

    Tasks without class names are left out.
    """
    counts: Counter[tuple[str, str]] = Counter()
    for task in predictions:
        if (names := task.get("classes")) and task.get("labels") and task.get("predictions"):
            for label, prediction in zip(task["labels"], task["predictions"], strict=True):
                counts[_class_name(names, label), _class_name(names, prediction)] += 1
    return counts


def _class_name(names: Sequence[str], index: int) -> str:
    """The name of a class; a learner may have more outputs than the test tasks have classes."""
    return str(names[index]) if index < len(names) else f"output {index}"


def _context(record: RunRecord, figures: Mapping[str, Figure], now: float) -> dict[str, Any]:
    results, metric = record.results or {}, record.metric
    status = record.status(now)
    confusions = count_confusions(record.predictions)
    wrong = Counter({pair: count for pair, count in confusions.items() if pair[0] != pair[1]})
    curves = [(name, _heading(name.removeprefix("curve-"))) for name in figures if "curve-" in name]
    return {
        "version": __version__,
        "made": format_time(now),
        "title": record.title,
        "directory": str(record.directory),
        "run": shlex.quote(str(record.directory)),
        "status": status,
        "state": _state(record, status, now),
        "result": _result(record),
        "published": compare_with_published(record),
        "facts": _facts(record),
        "error": record.error,
        "error_line": _last_line(record.error),
        "warnings": list(results.get("warnings") or ()),
        "curves": curves,
        "confusions": [(*pair, count) for pair, count in wrong.most_common(_CONFUSED_PAIRS)],
        "tasks": _task_groups(record),
        "hardest": _hardest_rows(record),
        "task_count": len(record.predictions),
        "metric_name": metric_label(metric),
        "profiles": _profiles(record.directory),
        "commands": list(record.commands().items()),
        "own_classes": bool(trust_option(record.config)),
        "tables": [
            (heading, _rows(content))
            for heading, content in (
                ("Protocol", results.get("protocol")),
                ("Method", results.get("method")),
                ("Environment", record.environment),
            )
            if content
        ],
        "config": _rows(record.config),
    }


def _last_line(error: str) -> str:
    """The last line of a traceback; "" for an error of one line."""
    lines = error.strip().splitlines()
    return lines[-1] if len(lines) > 1 else ""


def _state(record: RunRecord, status: str, now: float) -> str:
    """A sentence on the progress of a run without results."""
    if status == "finished":
        return ""
    done, planned = record.iterations
    sentence = f"{done} of {planned} training iterations" if planned else f"{done} iterations"
    if record.written is not None:
        ago = format_duration(max(0.0, now - record.written))
        sentence += f"; the newest metrics are of {format_time(record.written)}, {ago} ago"
    if status == "ended without results":
        sentence += ". No error was recorded: the run was killed, or is very slow"
    return sentence + "."


def _result(record: RunRecord) -> dict[str, str] | None:
    results, metric = record.results or {}, record.metric
    if f"test_{metric}" in results:
        interval = _interval(results.get("ci95"), metric)
        return {
            "value": format_metric(float(results[f"test_{metric}"]), metric),
            "interval": interval,
            "caption": f"test {metric_label(metric)}, mean"
            f"{' and 95% interval' if interval else ''} over "
            f"{results.get('test_tasks', '?')} tasks",
        }
    validations = [line for line in record.metrics if f"validation_{metric}" in line]
    if not validations:
        return None
    newest = validations[-1]
    return {
        "value": format_metric(float(newest[f"validation_{metric}"]), metric),
        "interval": _interval(newest.get("validation_ci95"), metric),
        "caption": f"validation {metric_label(metric)} at iteration {newest['iteration']}",
    }


def _interval(half: Any, metric: str) -> str:
    """Format half the width of an interval; "" without one, such as for a single task."""
    missing = half is None or not math.isfinite(float(half))
    return "" if missing else format_metric(float(half), metric)


def _facts(record: RunRecord) -> list[tuple[str, str]]:
    results, metric, environment = record.results or {}, record.metric, record.environment
    done, planned = record.iterations
    training = [line for line in record.metrics if "train_loss" in line]
    facts = [("iterations", f"{done} of {planned}" if planned and planned != done else str(done))]
    if user_metrics := format_user_metrics(results, "test"):
        facts.append(("test metrics", ", ".join(user_metrics)))
    if training:
        facts.append(("training loss", format_number(float(training[-1]["train_loss"]))))
    if f"validation_{metric}" in results:
        value = float(results[f"validation_{metric}"])
        facts.append((f"validation {metric_label(metric)}", format_metric(value, metric)))
    if "wall_seconds" in results:
        facts.append(("time", format_duration(float(results["wall_seconds"]))))
    unit = "samples" if "samples_per_second" in results else "tasks"
    if (speed := results.get(f"{unit}_per_second")) is not None:
        facts.append(("speed", f"{float(speed):.4g} {unit}/s"))
    if "world_size" in environment:
        workers = counted(environment["world_size"], "worker")
        facts.append(("strategy", f"{environment.get('strategy', '?')}, {workers}"))
    facts.append(("seed", str(results.get("seed", record.config.get("seed", "?")))))
    if record.preset:
        facts.append(("preset", record.preset))
    return facts


def _task_groups(record: RunRecord) -> list[dict[str, Any]]:
    headings = {
        "hardest": ("Hardest test tasks", f"Those with the worst {metric_label(record.metric)}."),
        "typical": ("Typical test tasks", f"Around the median {metric_label(record.metric)}."),
    }
    by_number = {prediction["task"]: prediction for prediction in record.predictions}
    groups = []
    for kind, tasks in record.test_tasks.items():
        heading, caption = headings.get(kind, (kind, ""))
        shown = [_task(record, kind, task, by_number.get(task["task"], {})) for task in tasks]
        figures = any(task["figure"] for task in shown)
        groups.append({"heading": heading, "caption": caption, "tasks": shown, "figures": figures})
    return groups


def _task(
    record: RunRecord, kind: str, task: Mapping[str, Any], predicted: Mapping[str, Any]
) -> dict[str, Any]:
    number, metric, summary = task["task"], record.metric, ""
    if metric in predicted:
        summary = f"{metric_label(metric)} {format_metric(float(predicted[metric]), metric)}"
    common = {"number": number, "summary": summary, "key": f"{record.eval_seed},test,0,{number}"}
    if "inputs" in task:
        figure = f"task-{kind}-{number}" if _has_curve(task, predicted) else ""
        return {**common, "figure": figure, "support": (), "query": ()}
    support, query = task["support"], task["query"]
    labels, predictions = predicted.get("labels") or [], predicted.get("predictions") or []
    ways = max([*support["labels"], *labels, *predictions], default=0) + 1
    names = predicted.get("classes") or [""] * ways
    shown_queries, queries = len(query["indices"]), len(labels)
    return {
        **common,
        "figure": "",
        "omitted": f", {shown_queries} of {queries}" if shown_queries < queries else "",
        "support": [
            {"source": source, "letter": class_letter(label), "label": _class_name(names, label)}
            for source, label in zip(support["images"], support["labels"], strict=True)
        ],
        "query": [
            {
                "source": source,
                "label": class_letter(labels[index]),
                "prediction": class_letter(predictions[index]),
                "title": f"{_class_name(names, predictions[index])} predicted, "
                f"{_class_name(names, labels[index])} is true",
            }
            for source, index in zip(query["images"], query["indices"], strict=True)
            if index < len(labels) and index < len(predictions)
        ],
    }


def _hardest_rows(record: RunRecord) -> list[dict[str, Any]]:
    by_number = {prediction["task"]: prediction for prediction in record.predictions}
    rows = []
    for number in record.hardest(_HARDEST):
        task = by_number[number]
        value = float(task[record.metric])
        rows.append(
            {
                "task": number,
                "value": value,
                "text": format_metric(value, record.metric),
                "loss": format_number(float(task["loss"])) if "loss" in task else "",
                "classes": ", ".join(map(str, task.get("classes") or ())),
                "key": f"{record.eval_seed},test,0,{number}",
            }
        )
    return rows


def _profiles(directory: Path) -> list[tuple[str, str]]:
    files = sorted((directory / PROFILE_DIRECTORY).glob("rank*.txt"))
    profiles = []
    for path in files:
        with contextlib.suppress(OSError):  # a link to another file, a pipe, or not readable
            profiles.append((path.stem, read_regular(path, "replace", within=directory)))
    return profiles


def _rows(content: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The values of nested mappings by dotted key."""
    return [
        (key, ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value))
        for key, value in flatten_values(content).items()
    ]


def _heading(name: str) -> str:
    label = metric_label(name, short=True)
    return label[:1].upper() + label[1:]
