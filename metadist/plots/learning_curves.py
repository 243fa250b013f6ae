"""Learning curves of one run, and of several runs in comparison."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from metadist.metrics import METRIC_MODES, is_percentage, metric_label
from metadist.plots.points import (
    curve_labels,
    curve_names,
    moving_average,
    series,
    validation_or_training,
)
from metadist.plots.style import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    RED,
    add_legend,
    make_axes,
    new_figure,
    save_figure,
    style_axes,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MetricsList = Sequence[Mapping[str, Any]]
"""The metrics of training iterations and validations in any order, as in `metrics.jsonl`."""

_COLORS = (BLUE, ORANGE, GREEN, RED, PURPLE, "#8c5a3c", "#d05c9f", GREY)
_STYLES = ("-", "--", ":", "-.")
_COLUMNS = 3
_LEGEND_WIDTH = 60  # characters
_LABEL_WIDTH = 40


class ComparisonData(NamedTuple):
    """Runs with the same metric, in one panel of a comparison.

    Attributes:
        title: the title, in one line.
        metric: "accuracy" (0 to 1) or "mse"; "mse" is shown on a logarithmic scale.
        runs: the metrics of runs by name; runs with one name, such as runs of several seeds, have
            the same color.
    """

    title: str
    metric: str
    runs: Mapping[str, Sequence[MetricsList]]


def plot_learning_curves(
    metrics: MetricsList,
    path: Path,
    title: str,
    test: tuple[float, float] | None = None,
    split_descriptions: Mapping[str, str] | None = None,
    algorithm: Mapping[str, Any] | None = None,
) -> Path:
    """Plots the loss, the accuracy or MSE and other metrics against the training iteration.

    Args:
        metrics: the metrics of the run.
        path: the PNG file to write.
        title: the title, in one line.
        test: the test accuracy (0 to 1) or test MSE, and half the width of its 95% interval.
        split_descriptions: descriptions of what "validation" and "test" measure. Default: unseen
            classes, for an accuracy.
        algorithm: the node `algorithm` of the run's configuration, for the numbers of inner steps.

    Returns:
        `path`.

    Raises:
        UserError: the file cannot be written.
    """
    shown = curve_names(metrics) or ["loss"]
    columns = min(len(shown), _COLUMNS)
    rows = -(-len(shown) // columns)
    figure = new_figure(5.6 * columns, 3.9 * rows, title, columns if rows == 1 else None)
    grid = make_axes(figure, rows, columns, len(shown), sharex=True)
    descriptions = split_descriptions or {}
    training, validation = curve_labels(algorithm or {})
    for axes, metric in zip(grid, shown, strict=True):
        note = descriptions.get("validation", "unseen classes" if metric == "accuracy" else "")
        noted = f"{validation}, {note}" if note else validation
        _plot_metric(axes, metrics, metric, training, noted)
        if test is not None and metric in ("accuracy", "mse"):
            _plot_test(axes, metric, *test, descriptions.get("test", ""))
        _style_metric_axes(axes, metric)
        axes.tick_params(labelbottom=True)  # in all rows, not only in the last one
    iterations = {int(record["iteration"]) for record in metrics}
    if len(iterations) == 1:  # a single point does not set the limits
        grid[0].set_xlim(min(iterations) - 1, max(iterations) + 1)
    return save_figure(figure, path)


def plot_comparison(panels: Sequence[ComparisonData], path: Path, title: str) -> Path:
    """Plots the validation metric of several runs, three panels in a row.

    For a run without validation the smoothed training metric is plotted, and labeled so. The axis
    of the iterations is logarithmic in a panel where some runs are ten times as long as others.

    Args:
        panels: the panels, at least one.
        path: the PNG file to write.
        title: the title, in one line.

    Returns:
        `path`.

    Raises:
        UserError: the file cannot be written.
    """
    columns = min(len(panels), _COLUMNS)
    rows = -(-len(panels) // columns)
    names = max(len(panel.runs) for panel in panels)
    figure = new_figure(max(5.4 * columns, 7.0), (4.1 + 0.22 * names) * rows + 0.6, title)
    for axes, panel in zip(make_axes(figure, rows, columns, len(panels)), panels, strict=True):
        _plot_runs(axes, panel)
    return save_figure(figure, path)


def _plot_metric(
    axes: "Axes", metrics: MetricsList, metric: str, training: str, validation: str
) -> None:
    iterations, values = series(metrics, f"train_{metric}")
    if len(iterations):
        sparse = len(iterations) < 20
        axes.plot(
            iterations,
            values,
            color=BLUE,
            alpha=1 if sparse else 0.25,
            linewidth=1,
            marker="o" if sparse else None,
            markersize=4,
            label=training if sparse else f"{training}, each iteration",
        )
        if not sparse:
            smooth = moving_average(values, window=max(5, len(values) // 25))
            label = f"{training}, smoothed"
            axes.plot(iterations, smooth, color=BLUE, linewidth=1.8, label=label)
    iterations, values = series(metrics, f"validation_{metric}")
    if len(iterations):
        axes.plot(
            iterations,
            values,
            color=ORANGE,
            linewidth=1.5,
            marker="o",
            markersize=5 if len(iterations) < 40 else 2.5,
            label=textwrap.fill(validation, _LABEL_WIDTH),
        )


def _plot_test(axes: "Axes", metric: str, value: float, ci95: float, description: str) -> None:
    has_interval = math.isfinite(ci95)  # a single task has no interval
    if is_percentage(metric):
        interval = f" ± {100 * ci95:.1f}%" if has_interval else ""
        label = f"final test: {100 * value:.1f}%{interval}"
    else:
        label = f"final test: {value:.3g}" + (f" ± {ci95:.2g}" if has_interval else "")
    if description:
        label = textwrap.fill(f"{label}, {description}", _LABEL_WIDTH)
    axes.axhline(value, color=GREEN, linestyle="--", linewidth=1.5, label=label)
    if has_interval:
        axes.axhspan(value - ci95, value + ci95, color=GREEN, alpha=0.15, linewidth=0)


def _style_metric_axes(axes: "Axes", metric: str) -> None:
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    axes.set_xlabel("training iteration")
    axes.set_ylabel(metric_label(metric).capitalize() if metric in METRIC_MODES else metric)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    if is_percentage(metric):
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        low, high = axes.get_ylim()
        axes.set_ylim(max(low, -0.02), min(high, 1.02))
    style_axes(axes)
    add_legend(axes)


def _plot_runs(axes: "Axes", panel: ComparisonData) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

    ends = []
    for index, (name, runs) in enumerate(panel.runs.items()):
        for number, metrics in enumerate(runs):
            iterations, values, note = validation_or_training(metrics, panel.metric)
            ends += iterations[-1:].tolist()
            axes.plot(
                iterations,
                values,
                _STYLES[index // len(_COLORS) % len(_STYLES)],
                color=_COLORS[index % len(_COLORS)],
                linewidth=1.5,
                alpha=0.85,
                marker="o" if len(iterations) < 12 else None,
                markersize=4,
                label=textwrap.fill(f"{name}{note}", _LEGEND_WIDTH) if not number else None,
            )
    axes.set_title(panel.title, fontsize=10.5, parse_math=False)
    axes.set_xlabel("training iteration")
    axes.set_ylabel(metric_label(panel.metric).capitalize())
    if ends and max(ends) >= 10 * min(ends):  # short runs stay legible beside long ones
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    if is_percentage(panel.metric):
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    else:
        axes.set_yscale("log")
        for set_formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            set_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.tick_params(axis="y", which="minor", labelsize=7)
    style_axes(axes, grid="both")
    # Below the axes, where long names do not hide a curve.
    add_legend(axes, fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.13))
