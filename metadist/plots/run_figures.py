"""Interactive figures of one run: Plotly's `data` and `layout` as plain containers.

A page draws them with plotly.js; `plotly.graph_objects.Figure(figure)` is the same figure in
Python. Texts may hold `<` and `&`. Values that are not finite are None, a gap.
"""

import html
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from metadist.metrics import is_percentage, metric_label
from metadist.plots.points import curve_labels, moving_average, series

Figure = dict[str, Any]
"""A figure with the keys `data` and `layout`."""

# Readable on white and on black.
BLUE = "#3b82d6"
ORANGE = "#e8833a"
GREEN = "#2fa463"
RED = "#e05252"
PURPLE = "#9a6fd6"
GREY = "#8a8f98"
COLORS = (BLUE, ORANGE, GREEN, RED, PURPLE, "#b0793f", "#d76cae", "#35a7b5", GREY)

MAX_POINTS = 1500
"""The most points of a curve; longer curves are thinned."""

_FEW_POINTS = 20
_DASHED = {"color": GREEN, "dash": "dash", "width": 1.5}


def finite(values: Sequence[float] | np.ndarray) -> list[float | None]:
    """The values, with None for values that are not finite."""
    return [float(value) if math.isfinite(value) else None for value in values]


def text(value: object) -> str:
    """A text escaped for Plotly, which interprets some HTML tags."""
    return html.escape(str(value), quote=False)


def error_bars(half_widths: Sequence[float] | np.ndarray, **style: Any) -> dict[str, Any]:
    """Vertical or horizontal error bars; values that are not finite have none."""
    array = [half_width or 0.0 for half_width in finite(half_widths)]
    return {"type": "data", "array": array, **style}


def axis(title: str, metric: str | None = None, **options: Any) -> dict[str, Any]:
    """An axis; the axis of an accuracy is in percent."""
    percent: dict[str, Any] = {}
    if metric is not None and is_percentage(metric):
        percent = {"tickformat": ".0%", "hoverformat": ".2%", "rangemode": "nonnegative"}
    return {"title": {"text": text(title)}, "automargin": True, **percent, **options}


def iteration_axis(metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The axis of training iterations, with whole numbers only."""
    short = max((int(record["iteration"]) for record in metrics), default=0) <= 10
    ticks: dict[str, Any] = {"dtick": 1} if short else {}
    return axis("training iteration", **ticks)


def thin(iterations: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Thin a curve to at most `MAX_POINTS`: the lowest and the highest point of each interval.

    A thinned curve omits points that are not finite.
    """
    if len(values) <= MAX_POINTS:
        return iterations, values
    kept = []
    for part in np.array_split(np.arange(len(values)), MAX_POINTS // 2):
        part = part[np.isfinite(values[part])]
        if len(part):
            ends = {part[values[part].argmin()], part[values[part].argmax()]}
            kept += sorted(ends)
    return iterations[kept], values[kept]


def learning_curve(
    metrics: Sequence[Mapping[str, Any]],
    metric: str,
    test: tuple[float, float] | None = None,
    intervals: bool = False,
    algorithm: Mapping[str, Any] | None = None,
) -> Figure:
    """A metric in training and validation against the iteration.

    Args:
        metrics: the metrics of the run, as in `metrics.jsonl`.
        metric: the metric's name, such as "loss"; `train_{metric}` and `validation_{metric}` are
            shown.
        test: the test metric and half the width of its interval; None for no line.
        intervals: whether `validation_ci95` is the interval of this metric.
        algorithm: the node `algorithm` of the run's configuration, for the numbers of inner steps.
    """
    data: list[dict[str, Any]] = []
    training, validation = curve_labels(algorithm or {})
    iterations, values = series(metrics, f"train_{metric}")
    if len(values):
        x, y = thin(iterations, values)
        smooth = len(values) >= _FEW_POINTS
        data.append(_line(x, y, training, BLUE, opacity=0.35 if smooth else 1.0, line={"width": 1}))
        if smooth:
            mean = moving_average(values, max(5, len(values) // 25))
            x, y = thin(iterations, mean)
            data.append(_line(x, y, f"{training}, smoothed", BLUE, line={"width": 2}))
    iterations, values = series(metrics, f"validation_{metric}")
    if len(values):
        curve = _line(iterations, values, validation, ORANGE, mode="lines+markers")
        measured, half_widths = series(metrics, "validation_ci95")
        if intervals and np.array_equal(measured, iterations):
            curve["error_y"] = error_bars(half_widths, thickness=1, width=2)
        data.append(curve)
    layout: dict[str, Any] = {
        "xaxis": iteration_axis(metrics),
        "yaxis": axis(metric_label(metric), metric),
        "hovermode": "x unified",
    }
    if test is not None and math.isfinite(test[0]):
        layout |= _test_line(*test)
    return {"data": data, "layout": layout}


def training_curve(
    metrics: Sequence[Mapping[str, Any]], name: str, label: str, logarithmic: bool = False
) -> Figure:
    """A value of every iteration, such as `gradient_norm` or `learning_rate`."""
    iterations, values = series(metrics, name)
    if logarithmic:
        values = np.where(values > 0, values, np.nan)
    x, y = thin(iterations, values)
    kind = {"type": "log"} if logarithmic else {"rangemode": "tozero"}
    layout = {
        "xaxis": iteration_axis(metrics),
        "yaxis": axis(label, **kind),
        "hovermode": "x unified",
        "showlegend": False,
    }
    return {"data": [_line(x, y, label, BLUE, line={"width": 1.3})], "layout": layout}


def metric_by_steps(rows: Sequence[Mapping[str, Any]], metric: str) -> Figure:
    """The test metric after each number of inner steps, with 95% intervals.

    Args:
        rows: one row for each number of steps, with `steps`, `mean` and `ci95`, as in
            `results.json`.
        metric: "accuracy" or "mse".
    """
    steps = [int(row["steps"]) for row in rows]
    curve = _line(
        np.array(steps),
        [float(row["mean"]) for row in rows],
        f"test {metric_label(metric)}",
        GREEN,
        mode="lines+markers",
        error_y=error_bars([float(row["ci95"]) for row in rows], thickness=1.2),
    )
    ticks: dict[str, Any] = {"tickmode": "array", "tickvals": steps} if len(steps) <= 12 else {}
    layout = {
        "xaxis": axis("inner steps", **ticks),
        "yaxis": axis(f"test {metric_label(metric)}", metric),
        "showlegend": False,
    }
    return {"data": [curve], "layout": layout}


def task_histogram(values: Sequence[float], metric: str) -> Figure:
    """The distribution of the metric over the test tasks, with a line at the mean."""
    shown = [value for value in finite(values) if value is not None]
    # One bin for each possible accuracy if there are few: bins between them would be empty.
    distinct = sorted(set(shown))
    gaps = [right - left for left, right in pairwise(distinct)]
    bins: dict[str, Any] = {"nbinsx": 40}
    size = min(gaps, default=0.0)
    if is_percentage(metric) and size >= 0.01 and all(_is_multiple(x, size) for x in distinct):
        bins = {"xbins": {"start": -size / 2, "end": 1 + size / 2, "size": size}}
    trace = {"type": "histogram", "x": shown, "marker": {"color": BLUE}, "name": "tasks", **bins}
    layout: dict[str, Any] = {
        "xaxis": axis(f"test {metric_label(metric)} of a task", metric),
        "yaxis": axis("tasks"),
        "showlegend": False,
        "bargap": 0.06,
    }
    if shown:
        mean = sum(shown) / len(shown)
        line = {"type": "line", "x0": mean, "x1": mean, "y0": 0, "y1": 1, "yref": "paper"}
        layout["shapes"] = [{**line, "line": _DASHED}]
    return {"data": [trace], "layout": layout}


def _is_multiple(value: float, size: float) -> bool:
    return abs(value / size - round(value / size)) < 1e-3


def confusion_matrix(names: Sequence[str], counts: Sequence[Sequence[int]]) -> Figure:
    """The confusion matrix of the queries: rows are true classes, columns predicted classes."""
    labels = [text(name) for name in names]
    shares = [[count / (sum(row) or 1) for count in row] for row in counts]
    trace = {
        "type": "heatmap",
        "x": labels,
        "y": labels,
        "z": shares,
        "customdata": [list(row) for row in counts],
        "zmin": 0,
        "zmax": 1,
        "colorscale": "Viridis",
        "colorbar": {"tickformat": ".0%", "thickness": 12},
        "hovertemplate": "true %{y}<br>predicted %{x}<br>%{customdata} (%{z:.1%})<extra></extra>",
    }
    layout = {
        "xaxis": axis("predicted class", type="category"),
        "yaxis": axis("true class", type="category", autorange="reversed"),
    }
    return {"data": [trace], "layout": layout}


def time_bar(seconds: Mapping[str, float]) -> Figure:
    """The parts of a run's time in one bar."""
    total = sum(seconds.values()) or 1.0
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "y": [""],
            "x": [value],
            "name": text(name),
            "marker": {"color": color},
            "text": [f"{value / total:.0%}" if value / total > 0.04 else ""],
            "textposition": "inside",
            "insidetextanchor": "middle",
            "hovertemplate": f"{text(name)}: %{{x:.1f}} s ({value / total:.1%})<extra></extra>",
        }
        for color, (name, value) in zip(COLORS, seconds.items(), strict=False)
    ]
    layout = {
        "barmode": "stack",
        "legend": {"traceorder": "normal"},
        "xaxis": axis("seconds"),
        "yaxis": {"visible": False},
        "height": 170,
    }
    return {"data": data, "layout": layout}


def regression_task(
    support: Sequence[Sequence[float]],
    inputs: Sequence[float],
    targets: Sequence[float],
    before: Sequence[float],
    after: Sequence[float],
) -> Figure:
    """The predictions for a scalar function before and after adaptation.

    Args:
        support: the inputs and the targets of the support set.
        inputs: the inputs of the queries, ascending.
        targets: the targets of the queries.
        before: the predictions for the queries before adaptation; may be empty.
        after: the predictions for the queries after adaptation.
    """
    x = np.asarray(inputs, dtype=np.float64)
    data = [
        _line(x, values, name, color, mode="lines+markers", marker={"size": 5}, line=line)
        for name, values, color, line in (
            ("truth", targets, GREEN, {"width": 2}),
            ("before adaptation", before, GREY, {"width": 1.5, "dash": "dot"}),
            ("after adaptation", after, BLUE, {"width": 2, "dash": "dash"}),
        )
        if len(values)
    ]
    points = {
        "type": "scatter",
        "mode": "markers",
        "name": "adapted on",
        "x": finite(support[0]),
        "y": finite(support[1]),
        "marker": {"symbol": "triangle-up", "size": 11, "color": ORANGE},
    }
    layout = {"xaxis": axis("input"), "yaxis": axis("output")}
    return {"data": [*data, points], "layout": layout}


def _line(
    x: np.ndarray, y: Sequence[float] | np.ndarray, name: str, color: str, **options: Any
) -> dict[str, Any]:
    line = {"color": color, **options.pop("line", {})}
    marker = {"color": color, **options.pop("marker", {})}
    mode = {"mode": "lines+markers" if len(x) < _FEW_POINTS else "lines"}  # one point makes no line
    return {
        "type": "scatter",
        "x": x.tolist(),
        "y": finite(y),
        "name": name,
        "line": line,
        "marker": marker,
        **mode,
        **options,
    }


def _test_line(mean: float, margin: float) -> dict[str, Any]:
    """The layout of a horizontal line and its interval."""
    across = {"xref": "paper", "x0": 0, "x1": 1}
    shapes = [{"type": "line", **across, "y0": mean, "y1": mean, "line": _DASHED}]
    if math.isfinite(margin):
        band = {"type": "rect", **across, "y0": mean - margin, "y1": mean + margin}
        shapes.append({**band, "fillcolor": GREEN, "opacity": 0.15, "line": {"width": 0}})
    corner = {"x": 1, "xref": "paper", "xanchor": "right", "y": mean, "yanchor": "bottom"}
    label = {"text": "test", **corner, "showarrow": False, "font": {"color": GREEN}}
    return {"shapes": shapes, "annotations": [label]}
