"""A sweep at a glance: lines, a heat map or rows, whichever fits what was swept."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from metadist.plots.sheet import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PURPLE,
    RED,
    lighten,
    save,
    sheet,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = (BLUE, ORANGE, GREEN, RED, GREY, PURPLE, "#a0622d", "#d169a8")
_MOST_ROWS = 30
_LEAST_OF_A_LINE = 3


class SweepPoint(NamedTuple):
    """One setting's figure.

    Attributes:
        values: of the swept keys, in their order.
        mean: accuracy (0 to 1) or MSE.
        ci95: half the width of its 95% interval; None where it is not known.
        best: whether it is the one that was chosen.
    """

    values: tuple[str, ...]
    mean: float
    ci95: float | None
    best: bool


def sweep_picture(
    points: Sequence[SweepPoint],
    keys: Sequence[str],
    metric: str,
    path: Path,
    caption: str,
    chosen_by: str = "validation",
) -> Path:
    """Draws the test figure of every setting of a sweep.

    A key of at least three numbers gives lines over it, one for each setting of the other keys,
    up to eight; two keys whose values all meet give a heat map; anything else a row a setting,
    the best first: 30, and the one chosen.

    Args:
        points: the settings that have a figure, at least one.
        keys: what was swept.
        metric: "accuracy" or "mse".
        path: the PNG file to write.
        caption: what the figures and intervals are over.
        chosen_by: what the best was chosen by, "validation" or "test".

    Returns:
        `path`.

    Raises:
        UserError: if it cannot be written.
    """
    what = "Test accuracy" if metric == "accuracy" else "Test mean squared error"
    title = f"{what} by {' and '.join(keys)}" if keys else what
    best = f"best on {chosen_by}"
    along = _line_key(points, len(keys))
    if along is not None:
        figure = sheet(7.2, 4.4, title)
        axes = figure.subplots()
        _lines(axes, points, keys, along, best)
        _accuracy_axis(axes, metric, vertical=True)
    elif len(keys) == 2 and _is_grid(points):
        rows, columns = (_ordered(points, place) for place in (0, 1))
        figure = sheet(2.6 + 1.35 * max(3, len(columns)), 1.9 + 0.7 * max(2, len(rows)), title)
        axes = figure.subplots()
        _heat_map(axes, points, keys, rows, columns, metric, best)
    else:
        shown = sorted(points, key=lambda point: point.mean, reverse=metric == "accuracy")
        shown = [p for place, p in enumerate(shown) if place < _MOST_ROWS or p.best]
        figure = sheet(7.6, 1.7 + 0.32 * len(shown), title)
        axes = figure.subplots()
        _rows(axes, shown, keys, len(points), best)
        _accuracy_axis(axes, metric, vertical=False)
    axes.set_title(caption, fontsize=9, color=GREY, parse_math=False)
    return save(figure, path)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _ordered(points: Sequence[SweepPoint], place: int) -> list[str]:
    """A key's values: numbers by size, words as they came."""
    values = list(dict.fromkeys(point.values[place] for point in points))
    numbers = [_number(value) for value in values]
    return values if None in numbers else sorted(values, key=float)


def _line_key(points: Sequence[SweepPoint], keys: int) -> int | None:
    """The key along which lines are drawn: of those that are numbers, the one of most values."""
    counts = {}
    for place in range(keys):
        values = _ordered(points, place)
        if len(values) >= _LEAST_OF_A_LINE and all(_number(v) is not None for v in values):
            counts[place] = len(values)
    if not counts:
        return None
    along = max(counts, key=counts.__getitem__)
    others = {_without(point.values, along) for point in points}
    # A search that draws its values at random has hardly two points on a line.
    return along if len(others) <= len(_COLOURS) and len(points) >= 2 * len(others) else None


def _without(values: tuple[str, ...], place: int) -> tuple[str, ...]:
    return values[:place] + values[place + 1 :]


def _is_grid(points: Sequence[SweepPoint]) -> bool:
    rows, columns = (len(_ordered(points, place)) for place in (0, 1))
    return rows > 1 and columns > 1 and len(points) == rows * columns <= 200


def _lines(
    axes: "Axes", points: Sequence[SweepPoint], keys: Sequence[str], along: int, best: str
) -> None:
    from matplotlib.ticker import NullLocator

    groups: dict[tuple[str, ...], list[SweepPoint]] = {}
    for point in points:
        groups.setdefault(_without(point.values, along), []).append(point)
    names = [key for place, key in enumerate(keys) if place != along]
    for colour, (others, group) in zip(_COLOURS, groups.items(), strict=False):
        group.sort(key=lambda point: float(point.values[along]))
        axes.errorbar(
            [float(point.values[along]) for point in group],
            [point.mean for point in group],
            yerr=[point.ci95 or 0.0 for point in group],
            color=colour,
            marker="o",
            markersize=5,
            linewidth=1.5,
            elinewidth=1,
            capsize=3,
            label=", ".join(f"{n}={v}" for n, v in zip(names, others, strict=True)) or None,
        )
    for point in points:
        if point.best:
            axes.plot(
                float(point.values[along]), point.mean, "o", markersize=13, fillstyle="none",
                color=INK, label=best, linestyle="none",
            )  # fmt: skip
    named = {float(point.values[along]): point.values[along] for point in points}
    values = sorted(named)
    if values[0] > 0 and values[-1] / values[0] >= 10:
        axes.set_xscale("log")
    if len(values) <= 8:
        axes.set_xticks(values, [named[value] for value in values])
        axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(keys[along], parse_math=False)
    lighten(axes)
    axes.legend(fontsize=8.5, frameon=True, framealpha=0.85, edgecolor="none")


def _heat_map(
    axes: "Axes",
    points: Sequence[SweepPoint],
    keys: Sequence[str],
    rows: list[str],
    columns: list[str],
    metric: str,
    best: str,
) -> None:
    grid = np.full((len(rows), len(columns)), np.nan)
    for point in points:
        grid[rows.index(point.values[0]), columns.index(point.values[1])] = point.mean
    image = axes.imshow(
        grid, cmap="viridis" if metric == "accuracy" else "viridis_r", aspect="auto"
    )
    # Colours that span less than the intervals would make noise look like a finding.
    low, high = np.nanmin(grid), np.nanmax(grid)
    widest = max(point.ci95 or 0.0 for point in points)
    spare = max(0.0, widest - (high - low)) / 2
    low, high = low - spare, high + spare
    image.set_clim(low, high)
    say = _say(metric)
    for point in points:
        place = rows.index(point.values[0]), columns.index(point.values[1])
        depth = 0.5 if high == low else (point.mean - low) / (high - low)
        bright = depth > 0.55 if metric == "accuracy" else depth < 0.45
        spread = "" if point.ci95 is None else f"\n± {say(point.ci95)}"
        mark = f"\n{best}" if point.best else ""
        axes.text(
            place[1], place[0], f"{say(point.mean)}{spread}{mark}", ha="center", va="center",
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
    bar.ax.yaxis.set_major_formatter(lambda value, _: say(value))


def _rows(
    axes: "Axes", shown: Sequence[SweepPoint], keys: Sequence[str], known: int, best: str
) -> None:
    for place, point in enumerate(shown):
        axes.errorbar(
            point.mean, place, xerr=point.ci95 or 0.0, color=GREEN if point.best else BLUE,
            marker="o", markersize=5, elinewidth=1.2, capsize=3, linestyle="none",
            label=best if point.best else None,
        )  # fmt: skip
    names = [
        "  ".join(f"{key}={value}" for key, value in zip(keys, point.values, strict=True))
        for point in shown
    ]
    axes.set_yticks(range(len(shown)), names, fontsize=8.5, parse_math=False)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    if known > len(shown):
        more = ", and the one chosen" if len(shown) > _MOST_ROWS else ""
        axes.set_ylabel(f"the best {_MOST_ROWS} of {known}{more}")
    lighten(axes)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8.5, frameon=True, framealpha=0.85, edgecolor="none")


def _say(metric: str) -> Callable[[float], str]:
    return (lambda v: f"{100 * v:.1f}%") if metric == "accuracy" else (lambda v: f"{v:.3g}")


def _accuracy_axis(axes: "Axes", metric: str, vertical: bool) -> None:
    from matplotlib.ticker import PercentFormatter

    axis = axes.yaxis if vertical else axes.xaxis
    label = "test accuracy" if metric == "accuracy" else "test mean squared error"
    (axes.set_ylabel if vertical else axes.set_xlabel)(label)
    if metric == "accuracy":
        axis.set_major_formatter(PercentFormatter(1.0, decimals=None))
