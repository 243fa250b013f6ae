"""What the pictures share: an empty sheet, colours, grid and edges, smoothing, and saving."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from metadist.loggers.writing import writing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DOTS_PER_INCH = 130

BLUE = "#2f6db3"
ORANGE = "#e07b29"
GREEN = "#2c974b"
RED = "#cf3636"
PURPLE = "#7b4fb3"
GREY = "#8a8f98"
INK = "#24292f"


def sheet(width: float, height: float, title: str, columns: int | None = None) -> "Figure":
    """An empty figure that belongs to no window.

    Args:
        width: in inches.
        height: in inches.
        title: one line over the panels, never read as TeX.
        columns: panels side by side, whose margins are then those of numbers and one line of
            text. None: the layout makes room for every label, which takes as long as drawing.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DOTS_PER_INCH, facecolor="white")
    FigureCanvasAgg(figure)
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


def panels(figure: "Figure", rows: int, columns: int, count: int) -> "list[Axes]":
    """A figure's first `count` panels of a grid, row by row; the rest of the grid is hidden."""
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in grid[count:]:
        axes.set_visible(False)
    return list(grid[:count])


def lighten(axes: "Axes", grid: Literal["major", "both"] | None = "major") -> None:
    """Takes away a panel's upper and right edge, and draws faint grid lines.

    Args:
        axes: the panel.
        grid: which lines: "major", "both" for the minor ones too, or None.
    """
    if grid is not None:
        axes.grid(alpha=0.25, which=grid)
    axes.spines[["top", "right"]].set_visible(False)


def save(figure: "Figure", path: Path) -> Path:
    """Writes the figure as PNG to `path`, whatever its suffix.

    Raises:
        UserError: if it cannot be written.
    """
    with writing(path):
        figure.savefig(path, format="png")
    return path


def smoothed(values: np.ndarray, window: int) -> np.ndarray:
    """The mean over a centred window, shorter at the ends, of the values that are finite."""
    finite = np.isfinite(values)
    kernel = np.ones(min(window, len(values)))
    total = np.convolve(np.where(finite, values, 0.0), kernel, mode="same")
    count = np.convolve(finite.astype(np.float64), kernel, mode="same")
    return np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0.5)
