"""Plots of the support set, queries and predictions of classification tasks."""

import io
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from metadist.files import REDIRECT_PLOT, atomic_write
from metadist.metrics import counted
from metadist.plots.points import class_letter, spread_over_classes
from metadist.plots.style import DPI, GREEN, GREY, INK, RED

if TYPE_CHECKING:
    from PIL.ImageFont import FreeTypeFont

_MAX_QUERIES = 10  # queries of a task that are shown
_MAX_SHOTS = 5  # shots of a class that are shown; fewer if there are many classes
_MAX_COLUMNS = 10  # classes in a row; further ones go to the next row

# Lengths, in units of the side of one image.
_PITCH = 1.16  # distance from one image to the next
_LABEL = 0.42  # height of a line of text above or below an image
_MARGIN = 1.8  # space left of the support set, for the name of the task
_GAP = 0.7  # space between support and query set

_PIXELS = 80  # pixels per unit
_THIN, _THICK = 1, 4  # width of a frame in pixels


class ClassificationData(NamedTuple):
    """One classification task and the predictions of the learner.

    Attributes:
        support_images: the images of the support set, shape (ways * shots, C, H, W), of any real
            range; C is 1 or 3.
        support_labels: their labels, integers from 0 to ways - 1, shape (ways * shots,).
        query_images: the images of the query set, shape (ways * queries, C, H, W).
        query_labels: their labels, integers, shape (ways * queries,).
        predictions: the predicted labels, integers, shape (ways * queries,).
    """

    support_images: np.ndarray
    support_labels: np.ndarray
    query_images: np.ndarray
    query_labels: np.ndarray
    predictions: np.ndarray


def plot_test_tasks(tasks: Sequence[ClassificationData], path: Path, title: str) -> Path:
    """Plots one row per task: the support set by class, then some queries with the predictions.

    The queries are the first ones of each class, or of evenly spaced classes if there are many.
    They are not selected by whether the prediction is correct.

    Args:
        tasks: the tasks, at least one and at most about nine.
        path: the PNG file to write.
        title: the title, in one line.

    Returns:
        `path`.

    Raises:
        UserError: the file cannot be written.
    """
    rows = [_TaskRow(task) for task in tasks]
    # Wide enough for the headings, even if there are few images.
    support_width = max(5.6, *(row.support_width for row in rows))
    query_width = max(4.6, *(row.query_width for row in rows))
    query_left = _MARGIN + support_width + _GAP
    width = max(query_left + query_width, 0.6 + 0.175 * len(title))
    header, footer, spacing = 2.0, 1.2, 0.4
    canvas = _Canvas(width, header + sum(row.height + spacing for row in rows) + footer)
    _plot_header(canvas, title, rows[0], query_left)
    top = header
    for number, row in enumerate(rows):
        row.plot(canvas, number, top, query_left)
        top += row.height + spacing
    _plot_legend(canvas, top)
    content = io.BytesIO()
    canvas.image.save(content, format="png")
    atomic_write(path, content.getvalue(), REDIRECT_PLOT)
    return path


class _Canvas:
    """A Pillow image with coordinates in units of the side of one task image.

    Pillow takes a fifth of the time of matplotlib, which needs an artist for each image, frame and
    text.
    """

    def __init__(self, width: float, height: float) -> None:
        from PIL import Image, ImageDraw

        size = math.ceil(width * _PIXELS), math.ceil(height * _PIXELS)
        self.image = Image.new("RGB", size, "white")
        self._draw = ImageDraw.Draw(self.image)

    def text(
        self,
        left: float,
        baseline: float,
        text: str,
        size: int,
        color: str = INK,
        bold: bool = False,
        anchor: str = "ls",
    ) -> None:
        """Draw one line of text.

        Args:
            left: the horizontal position, of the text's left end or middle.
            baseline: the vertical position, of the text's baseline or middle.
            text: the text.
            size: the font size in points of 1/72 inch, as in the other plots.
            color: the color, as `#rrggbb`.
            bold: whether the text is bold.
            anchor: Pillow's name for the anchor: "ls" for left end and baseline, "mm" for middle.
        """
        position = left * _PIXELS, baseline * _PIXELS
        self._draw.text(position, text, color, _font(size, bold), anchor)

    def frame(self, left: float, top: float, side: float, color: str, line: int) -> None:
        """Draw a frame around a square, `line` pixels wide, outside of the square."""
        x, y, pixels = (round(length * _PIXELS) for length in (left, top, side))
        box = (x - line, y - line, x + pixels + line - 1, y + pixels + line - 1)
        self._draw.rectangle(box, outline=color, width=line)

    def paste(self, left: float, top: float, pixels: np.ndarray) -> None:
        """Paste an image of shape (H, W, 3), with values from 0 to 1, scaled to one unit."""
        from PIL import Image

        image = Image.fromarray(np.round(255 * pixels).astype(np.uint8))
        position = round(left * _PIXELS), round(top * _PIXELS)
        self.image.paste(image.resize((_PIXELS, _PIXELS)), position)


@cache
def _font(size: int, bold: bool) -> "FreeTypeFont":
    import matplotlib
    from PIL import ImageFont

    name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    path = Path(matplotlib.get_data_path(), "fonts", "ttf", name)
    return ImageFont.truetype(str(path), size * DPI / 72)


class _TaskRow:
    """The row of one task: its layout and its drawing."""

    def __init__(self, task: ClassificationData) -> None:
        self.task = ClassificationData(*(np.asarray(array) for array in task))
        self.classes = np.unique(self.task.support_labels)
        self.shots = max(int((self.task.support_labels == label).sum()) for label in self.classes)
        columns = min(len(self.classes), _MAX_COLUMNS)
        lines = -(-len(self.classes) // _MAX_COLUMNS)
        self.shown_shots = min(self.shots, _MAX_SHOTS, max(1, 6 // lines))
        self.line_height = _LABEL + self.shown_shots * _PITCH
        self.queries = spread_over_classes(self.task.query_labels, _MAX_QUERIES)
        # Two lines of queries beside a support set of several lines.
        query_lines = 1 if lines * self.shown_shots == 1 else 2
        self.query_columns = max(1, -(-len(self.queries) // query_lines))
        self.support_width = columns * _PITCH
        self.query_width = self.query_columns * _PITCH + 0.2
        query_lines = -(-len(self.queries) // self.query_columns)
        query_height = _LABEL + query_lines * (_PITCH + _LABEL)
        self.height = max(lines * self.line_height, query_height)

    def plot(self, canvas: _Canvas, number: int, top: float, query_left: float) -> None:
        """Plots the task with its upper edge at `top`."""
        task = self.task
        correct = task.predictions == task.query_labels
        canvas.text(0.3, top + _LABEL + 0.35, f"Task {number}", 10, bold=True)
        canvas.text(0.3, top + _LABEL + 0.75, f"{100 * correct.mean():.0f}% correct", 9)
        for index, label in enumerate(self.classes):
            left = _MARGIN + index % _MAX_COLUMNS * _PITCH
            upper = top + index // _MAX_COLUMNS * self.line_height
            canvas.text(left + 0.5, upper + 0.2, class_letter(label), 8, anchor="mm")
            images = task.support_images[task.support_labels == label][: self.shown_shots]
            for shot, image in enumerate(images):
                self._plot_image(canvas, image, left, upper + _LABEL + shot * _PITCH, GREY, _THIN)
        for index, query in enumerate(self.queries):
            left = query_left + index % self.query_columns * _PITCH
            upper = top + _LABEL + index // self.query_columns * (_PITCH + _LABEL)
            color = GREEN if correct[query] else RED
            self._plot_image(canvas, task.query_images[query], left, upper, color, _THICK)
            text = class_letter(task.predictions[query])
            if not correct[query]:
                text += f", not {class_letter(task.query_labels[query])}"
            canvas.text(left + 0.5, upper + 1.24, text, 8, color, anchor="mm")

    def _plot_image(
        self, canvas: _Canvas, image: np.ndarray, left: float, top: float, color: str, line: int
    ) -> None:
        support = self.task.support_images
        low, high = float(support.min()), float(support.max())
        with np.errstate(invalid="ignore"):  # infinities
            pixels = np.clip((image - low) / (high - low or 1.0), 0, 1)
        pixels = np.nan_to_num(pixels).transpose(1, 2, 0)
        canvas.paste(left, top, np.broadcast_to(pixels, (*pixels.shape[:2], 3)))
        canvas.frame(left, top, 1, color, line)


def _plot_header(canvas: _Canvas, title: str, row: _TaskRow, query_left: float) -> None:
    canvas.text(0.3, 0.6, title, 13, bold=True)
    support = f"adapted on {counted(row.shots, 'example')} of each class"
    if row.shown_shots < row.shots:
        support += f", {row.shown_shots} are shown"
    query = f"new images, {len(row.queries)} of {len(row.task.query_labels)} are shown"
    for left, name, text in ((_MARGIN, "Support", support), (query_left, "Query", query)):
        canvas.text(left, 1.35, name, 11, bold=True)
        canvas.text(left, 1.75, text, 9)


def _plot_legend(canvas: _Canvas, top: float) -> None:
    for left, color, text in (
        (0.3, GREEN, "correct"),
        (3.3, RED, "incorrect: predicted, not true class"),
    ):
        canvas.frame(left, top, 0.34, color, _THICK)
        canvas.text(left + 0.55, top + 0.26, text, 9)
    text = "The letters name the classes of one task; the next task has other classes."
    canvas.text(0.3, top + 0.85, text, 9)
