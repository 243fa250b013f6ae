"""How several runs learned, beside each other: validation against the iteration."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from metadist.plots.sheet import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    RED,
    lighten,
    panels,
    save,
    sheet,
    smoothed,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = (BLUE, ORANGE, GREEN, RED, PURPLE, "#8c5a3c", "#d05c9f", GREY)
_STYLES = ("-", "--", ":", "-.")
_COLUMNS = 3
_NAME = 60  # letters in a line of the legend
_LABELS = {"accuracy": "Accuracy", "mse": "Mean squared error"}


class ComparedCurves(NamedTuple):
    """A panel: runs that have one metric and belong beside each other.

    Attributes:
        title: one line.
        metric: "accuracy" (0 to 1) or "mse", the latter on a logarithmic scale.
        runs: for each line's name the records of its runs, such as those of several seeds, drawn
            in one colour.
    """

    title: str
    metric: str
    runs: Mapping[str, Sequence[Sequence[Mapping[str, object]]]]


def compared_curves(compared: Sequence[ComparedCurves], path: Path, title: str) -> Path:
    """Draws the panels, three in a row.

    A run without any validation is drawn by its smoothed training figure, and says so.

    Args:
        compared: a panel each, at least one.
        path: the PNG file to write.
        title: one line.

    Returns:
        `path`.

    Raises:
        UserError: if it cannot be written.
    """
    columns = min(len(compared), _COLUMNS)
    rows = -(-len(compared) // columns)
    names = max(len(each.runs) for each in compared)
    figure = sheet(max(5.4 * columns, 7.0), (4.1 + 0.22 * names) * rows + 0.6, title)
    grid = panels(figure, rows, columns, len(compared))
    for axes, each in zip(grid, compared, strict=True):
        _panel(axes, each)
    return save(figure, path)


def _panel(axes: "Axes", panel: ComparedCurves) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

    for place, (name, runs) in enumerate(panel.runs.items()):
        colour = _COLOURS[place % len(_COLOURS)]
        style = _STYLES[place // len(_COLOURS) % len(_STYLES)]
        for number, records in enumerate(runs):
            iterations, values, note = _course(records, panel.metric)
            axes.plot(
                iterations,
                values,
                style,
                color=colour,
                linewidth=1.5,
                alpha=0.85,
                marker="o" if len(iterations) < 12 else None,
                markersize=4,
                label=textwrap.fill(f"{name}{note}", _NAME) if not number else None,
            )
    axes.set_title(panel.title, fontsize=10.5, parse_math=False)
    axes.set_xlabel("training iteration")
    axes.set_ylabel(_LABELS[panel.metric])
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    if panel.metric == "accuracy":
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    else:
        axes.set_yscale("log")
        for formatted in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            formatted(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.tick_params(axis="y", which="minor", labelsize=7)
    lighten(axes, grid="both")
    if axes.get_legend_handles_labels()[0]:
        # Below, where names of any length hide no curve.
        below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.13)}
        axes.legend(fontsize=8, frameon=False, **below)


def _course(
    records: Sequence[Mapping[str, object]], metric: str
) -> tuple[np.ndarray, np.ndarray, str]:
    """Iterations, values, and what to add to the name."""
    for source, note in ((f"validation_{metric}", ""), (f"train_{metric}", ", training")):
        points = sorted((int(r["iteration"]), float(r[source])) for r in records if source in r)
        if points:
            iterations, values = np.array(points).T
            if note:
                values = smoothed(values, window=max(1, len(values) // 50))
            return iterations, values, note
    return np.empty(0), np.empty(0), ", no record"
