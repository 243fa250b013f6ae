"""What the pictures share: an empty sheet, the colours, smoothing, and saving."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from metadist.tracking.writing import writing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DOTS_PER_INCH = 130

BLUE = "#2f6db3"
ORANGE = "#e07b29"
GREEN = "#2c974b"
RED = "#cf3636"
GREY = "#8a8f98"
INK = "#24292f"


def sheet(width: float, height: float) -> "Figure":
    """An empty figure that belongs to no window.

    Args:
        width: in inches.
        height: in inches.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DOTS_PER_INCH, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


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
