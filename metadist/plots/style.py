"""Figures, colors and axes for all plots."""

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from metadist.files import REDIRECT_PLOT, atomic_write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 130

BLUE = "#2f6db3"
ORANGE = "#e07b29"
GREEN = "#2c974b"
RED = "#cf3636"
PURPLE = "#7b4fb3"
GREY = "#8a8f98"
INK = "#24292f"


def new_figure(width: float, height: float, title: str, columns: int | None = None) -> "Figure":
    """An empty figure without a window.

    Args:
        width: the width in inches.
        height: the height in inches.
        title: the title above the axes, in one line, never read as TeX.
        columns: the number of columns of axes; margins are then fixed, with room for tick labels
            and one line of text. None for a constrained layout, which takes as long as drawing.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DPI, facecolor="white")
    figure.suptitle(title, fontsize=12, color=INK, parse_math=False)
    if columns is None:
        figure.set_layout_engine("constrained")
    else:
        sides, below, above = 0.9, 0.55, 0.4
        figure.subplots_adjust(
            left=sides / width,
            right=1 - sides / 3 / width,
            bottom=below / height,
            top=1 - above / height,
            wspace=1.2 * sides / (width / columns - 1.2 * sides),
        )
    return figure


def make_axes(
    figure: "Figure", rows: int, columns: int, count: int, sharex: bool = False
) -> "list[Axes]":
    """The first `count` axes of a grid, row by row; the others are hidden."""
    grid = figure.subplots(rows, columns, squeeze=False, sharex=sharex).ravel()
    for axes in grid[count:]:
        axes.set_visible(False)
    return list(grid[:count])


def style_axes(axes: "Axes", grid: Literal["major", "both"] | None = "major") -> None:
    """Hides the upper and right spine, and adds light grid lines.

    Args:
        axes: the axes.
        grid: the grid lines: "major", "both" for major and minor ones, or None.
    """
    if grid is not None:
        axes.grid(alpha=0.25, which=grid)
    axes.spines[["top", "right"]].set_visible(False)


def save_figure(figure: "Figure", path: Path) -> Path:
    """Writes the figure as PNG to `path`, which may have any suffix.

    Raises:
        UserError: the file cannot be written.
    """
    content = io.BytesIO()
    figure.savefig(content, format="png")
    atomic_write(path, content.getvalue(), REDIRECT_PLOT)
    return path


def add_legend(axes: "Axes", **options: Any) -> None:
    """Adds a legend, if anything in the axes has a label. Labels are never read as TeX.

    Args:
        axes: the axes.
        options: options of `Axes.legend`. Default: a translucent legend within the axes.
    """
    if not axes.get_legend_handles_labels()[0]:
        return
    within: dict[str, Any] = {"fontsize": 8.5, "framealpha": 0.85, "edgecolor": "none"}
    for label in axes.legend(**(options or within)).get_texts():
        label.set_parse_math(False)
