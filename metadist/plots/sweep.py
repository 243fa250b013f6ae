"""Plots of the test metric of every setting of a sweep: lines, a heat map or rows."""

import math
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from metadist.metrics import format_percent, is_percentage, larger_is_better, metric_label
from metadist.plots.points import SettingData, is_number, short_names, sort_key, sort_values
from metadist.plots.style import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PURPLE,
    RED,
    add_legend,
    new_figure,
    save_figure,
    style_axes,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = (BLUE, ORANGE, GREEN, RED, GREY, PURPLE, "#a0622d", "#d169a8")
_MAX_ROWS = 30
_MAX_TITLE = 70
_MAX_CELLS = 200
_MIN_LINE_POINTS = 3
_LABEL_WIDTH = 44
_LABEL_LINES = 4
_MAX_LEGEND = 60


def plot_sweep(
    points: Sequence[SettingData],
    keys: Sequence[str],
    metric: str,
    path: Path,
    caption: str,
    selected_by: str = "validation",
) -> Path:
    """Plots the test metric of every setting of a sweep.

    If a key has at least three numeric values, the metric is plotted over it as lines, one for each
    setting of the other keys; there must be at most eight lines, with names that fit a legend. For
    two keys with all combinations of their values, the plot is a heat map. Otherwise it has one row
    per setting, the best first: at most 30, and the selected one. Names of rows are wrapped, and
    cut after four lines.

    Args:
        points: the settings, at least one.
        keys: the swept keys.
        metric: "accuracy" or "mse".
        path: the PNG file to write.
        caption: a description of what the means and intervals are over.
        selected_by: the split whose metric selected the best setting, "validation" or "test".

    Returns:
        `path`.

    Raises:
        UserError: the file cannot be written.
    """
    name = f"Test {metric_label(metric)}"
    short = short_names(keys)
    title = f"{name} by {' and '.join(keys)}"
    if not keys or len(title) > _MAX_TITLE:
        title = name
    label = f"best on {selected_by}"
    line_key = _line_key(points, keys)
    if line_key is not None:
        figure = new_figure(7.2, 4.4, title)
        axes = figure.subplots()
        _plot_lines(axes, points, keys, line_key, label)
        _label_metric_axis(axes, metric, vertical=True)
    elif len(keys) == 2 and (grid := _grid(points)) is not None:
        rows, columns = grid
        width, height = 2.6 + 1.35 * max(3, len(columns)), 1.9 + 0.7 * max(2, len(rows))
        figure = new_figure(width, height, title)
        axes = figure.subplots()
        _plot_heat_map(axes, points, keys, rows, columns, metric, label)
    else:
        ranked = sorted(points, key=lambda point: sort_key(point.mean, metric))
        shown = [point for rank, point in enumerate(ranked) if rank < _MAX_ROWS or point.best]
        names = [_row_label(short, point.values) for point in shown]
        lines = max(name.count("\n") + 1 for name in names)
        figure = new_figure(8.6, 1.7 + (0.18 + 0.15 * lines) * len(shown), title)
        axes = figure.subplots()
        _plot_rows(axes, shown, names, len(points), label)
        _label_metric_axis(axes, metric, vertical=False)
    axes.set_title(caption, fontsize=9, color=GREY, parse_math=False)
    return save_figure(figure, path)


def _row_label(names: Sequence[str], values: Sequence[str]) -> str:
    items = [f"{name}={value}" for name, value in zip(names, values, strict=True)]
    lines = textwrap.wrap("  ".join(items), _LABEL_WIDTH, break_on_hyphens=False)
    if len(lines) > _LABEL_LINES:
        lines = [*lines[: _LABEL_LINES - 1], lines[_LABEL_LINES - 1][: _LABEL_WIDTH - 1] + "…"]
    return "\n".join(lines)


def _line_key(points: Sequence[SettingData], keys: Sequence[str]) -> int | None:
    """The index of the key on the horizontal axis of lines: the numeric key with most values."""
    counts = {}
    for index in range(len(keys)):
        values = sort_values([point.values[index] for point in points])
        if len(values) >= _MIN_LINE_POINTS and all(map(is_number, values)):
            counts[index] = len(values)
    if not counts:
        return None
    line_key = max(counts, key=counts.__getitem__)
    lines = {_without(point.values, line_key) for point in points}
    other_keys = _without(tuple(keys), line_key)
    longest = max(
        sum(len(f"{key}={value}, ") for key, value in zip(other_keys, line, strict=True))
        for line in lines
    )
    if longest > _MAX_LEGEND:
        return None
    # A random search hardly ever has two points on a line.
    return line_key if len(lines) <= len(_COLORS) and len(points) >= 2 * len(lines) else None


def _without(values: tuple[str, ...], index: int) -> tuple[str, ...]:
    return values[:index] + values[index + 1 :]


def _grid(points: Sequence[SettingData]) -> tuple[list[str], list[str]] | None:
    """The values of two keys if the points have all combinations of them, for a heat map."""
    rows, columns = (sort_values([point.values[index] for point in points]) for index in (0, 1))
    is_grid = len(rows) > 1 < len(columns) and len(points) == len(rows) * len(columns)
    return (rows, columns) if is_grid and len(points) <= _MAX_CELLS else None


def _plot_lines(
    axes: "Axes", points: Sequence[SettingData], keys: Sequence[str], line_key: int, label: str
) -> None:
    from matplotlib.ticker import NullLocator

    lines: dict[tuple[str, ...], list[SettingData]] = {}
    for point in points:
        lines.setdefault(_without(point.values, line_key), []).append(point)
    names = _without(tuple(keys), line_key)
    for color, (other_values, line) in zip(_COLORS, lines.items(), strict=False):
        line.sort(key=lambda point: float(point.values[line_key]))
        axes.errorbar(
            [float(point.values[line_key]) for point in line],
            [point.mean for point in line],
            yerr=[point.ci95 or 0.0 for point in line],
            color=color,
            marker="o",
            markersize=5,
            linewidth=1.5,
            elinewidth=1,
            capsize=3,
            label=", ".join(f"{k}={v}" for k, v in zip(names, other_values, strict=True)) or None,
        )
    for point in points:
        if point.best:
            axes.plot(
                float(point.values[line_key]), point.mean, "o", markersize=13, fillstyle="none",
                color=INK, label=label, linestyle="none",
            )  # fmt: skip
    texts = {float(point.values[line_key]): point.values[line_key] for point in points}
    values = sorted(texts)
    if values[0] > 0 and values[-1] / values[0] >= 10:
        axes.set_xscale("log")
    if len(values) <= 8:
        axes.set_xticks(values, [texts[value] for value in values])
        axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(keys[line_key], parse_math=False)
    style_axes(axes)
    add_legend(axes)


def _plot_heat_map(
    axes: "Axes",
    points: Sequence[SettingData],
    keys: Sequence[str],
    rows: list[str],
    columns: list[str],
    metric: str,
    label: str,
) -> None:
    grid = np.full((len(rows), len(columns)), np.nan)
    for point in points:
        grid[rows.index(point.values[0]), columns.index(point.values[1])] = point.mean
    cmap = "viridis" if larger_is_better(metric) else "viridis_r"
    image = axes.imshow(grid, cmap=cmap, aspect="auto")
    # Colors span at least the widest interval, so that noise does not look like a difference.
    finite = grid[np.isfinite(grid)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    widest = max(point.ci95 or 0.0 for point in points)
    margin = max(0.0, widest - (high - low)) / 2
    low, high = low - margin, high + margin
    image.set_clim(low, high)
    text: Callable[[float], str] = "{:.3g}".format
    if is_percentage(metric):
        text = partial(format_percent, decimals=1)
    for point in points:
        row, column = rows.index(point.values[0]), columns.index(point.values[1])
        depth = 0.5 if high == low else (point.mean - low) / (high - low)
        bright = depth > 0.55 if larger_is_better(metric) else depth < 0.45
        bright |= math.isnan(point.mean)  # such a cell has no color
        interval = "" if point.ci95 is None else f"\n± {text(point.ci95)}"
        mark = f"\n{label}" if point.best else ""
        axes.text(
            column, row, f"{text(point.mean)}{interval}{mark}", ha="center", va="center",
            fontsize=8.5, color=INK if bright else "white",
            fontweight="bold" if point.best else "normal",
        )  # fmt: skip
    axes.set_xticks(range(len(columns)), columns, parse_math=False)
    axes.set_yticks(range(len(rows)), rows, parse_math=False)
    axes.set_xlabel(keys[1], parse_math=False)
    axes.set_ylabel(keys[0], parse_math=False)
    axes.spines[:].set_visible(False)
    bar = axes.figure.colorbar(image, ax=axes, pad=0.02)
    bar.outline.set_visible(False)
    bar.ax.yaxis.set_major_formatter(lambda value, _: text(value))


def _plot_rows(
    axes: "Axes", shown: Sequence[SettingData], names: Sequence[str], total: int, label: str
) -> None:
    for index, point in enumerate(shown):
        axes.errorbar(
            point.mean, index, xerr=point.ci95 or 0.0, color=GREEN if point.best else BLUE,
            marker="o", markersize=5, elinewidth=1.2, capsize=3, linestyle="none",
            label=label if point.best else None,
        )  # fmt: skip
    axes.set_yticks(range(len(shown)), names, fontsize=8.5, parse_math=False)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    if total > len(shown):
        selected = ", and the selected one" if len(shown) > _MAX_ROWS else ""
        axes.set_ylabel(f"the best {_MAX_ROWS} of {total}{selected}")
    style_axes(axes)
    add_legend(axes)


def _label_metric_axis(axes: "Axes", metric: str, vertical: bool) -> None:
    from matplotlib.ticker import PercentFormatter

    axis = axes.yaxis if vertical else axes.xaxis
    axis.set_label_text(f"test {metric_label(metric)}")
    if is_percentage(metric):
        axis.set_major_formatter(PercentFormatter(1.0, decimals=None))
