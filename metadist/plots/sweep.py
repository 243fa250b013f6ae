"""Plots of the test metric of every setting of a sweep: lines or rows."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from metadist.metrics import is_percentage, metric_label
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
    setting of the other keys; there must be at most eight lines, with names that fit a legend.
    Otherwise the plot has one row per setting, the best first: at most 30, and the selected one.
    Names of rows are wrapped, and cut after four lines.

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
