"""What the pictures share: an empty sheet, the colours, and saving."""

from pathlib import Path
from typing import TYPE_CHECKING

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
