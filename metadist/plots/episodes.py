"""What the learner makes of classification tasks: what it saw, and what it answered."""

import math
import string
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from metadist.loggers.writing import writing
from metadist.plots.sheet import DOTS_PER_INCH, GREEN, GREY, INK, RED

if TYPE_CHECKING:
    from PIL.ImageFont import FreeTypeFont

_QUERIES = 10  # drawn of each task
_SHOTS = 5  # drawn of each class, fewer where there are many classes
_ACROSS = 10  # classes side by side before the support set goes on below

# All in units of one image's side.
_PITCH = 1.16  # from one image to the next
_LABEL = 0.42  # a line of text over or under an image
_MARGIN = 1.5  # left of the support set, for the task's name
_GAP = 0.7  # between support and query
_SIDE = 80  # one unit in the picture's points
_THIN, _THICK = 1, 4  # a frame's width, likewise


class EpisodePicture(NamedTuple):
    """One classification task and the learner's answers.

    Attributes:
        support_images: shape (ways * shots, C, H, W), any real range; C is 1 or 3.
        support_labels: integers, shape (ways * shots,), from 0 to ways - 1.
        query_images: shape (ways * queries, C, H, W).
        query_labels: integers, shape (ways * queries,).
        predicted: the learner's answers, integers, shape (ways * queries,).
    """

    support_images: np.ndarray
    support_labels: np.ndarray
    query_images: np.ndarray
    query_labels: np.ndarray
    predicted: np.ndarray


def test_episodes(episodes: Sequence[EpisodePicture], path: Path, title: str) -> Path:
    """Draws a row for each task: the support set by class, then some queries with the answers.

    The queries are the first of each class, or of classes evenly spaced where there are many,
    so that they do not flatter.

    Args:
        episodes: at least one, a handful.
        path: the PNG file to write.
        title: one line.

    Returns:
        `path`.

    Raises:
        UserError: if it cannot be written.
    """
    rows = [_Row(episode) for episode in episodes]
    # The headings need their room, however few images there are.
    support_width = max(5.6, *(row.support_width for row in rows))
    query_width = max(4.6, *(row.query_width for row in rows))
    width = max(_MARGIN + support_width + _GAP + query_width, 0.6 + 0.175 * len(title))
    head, foot, between = 2.0, 1.2, 0.4
    height = head + sum(row.height + between for row in rows) + foot
    paper = _Paper(width, height)
    _head(paper, title, rows[0], _MARGIN + support_width + _GAP)
    top = head
    for number, row in enumerate(rows, start=1):
        row.draw(paper, number, top, _MARGIN + support_width + _GAP)
        top += row.height + between
    _foot(paper, top)
    with writing(path):
        paper.image.save(path, format="png")
    return path


test_episodes.__test__ = False  # pytest takes any test_* that a test module imports for a test


class _Paper:
    """The picture, drawn on in units of one image's side. Pillow takes a fifth of the time that
    matplotlib takes with an artist for each image, frame and text, and every run waits for it.
    """

    def __init__(self, width: float, height: float) -> None:
        from PIL import Image, ImageDraw

        size = math.ceil(width * _SIDE), math.ceil(height * _SIDE)
        self.image = Image.new("RGB", size, "white")
        self._pen = ImageDraw.Draw(self.image)

    def text(
        self,
        left: float,
        base: float,
        told: str,
        size: int,
        colour: str = INK,
        bold: bool = False,
        anchor: str = "ls",
    ) -> None:
        """One line of text.

        Args:
            left: where it starts, or its middle.
            base: its base line, or its middle.
            told: the text.
            size: in points of 1/72 inch, as on the other pictures.
            colour: as `#rrggbb`.
            bold: whether it is in bold type.
            anchor: Pillow's name for what `left` and `base` are: "ls" or "mm".
        """
        place = left * _SIDE, base * _SIDE
        self._pen.text(place, told, colour, _font(size, bold), anchor)

    def frame(self, left: float, top: float, side: float, colour: str, line: int) -> None:
        """A square's frame, `line` of the picture's points wide, outside of the square."""
        x, y, points = (round(place * _SIDE) for place in (left, top, side))
        outer = (x - line, y - line, x + points + line - 1, y + points + line - 1)
        self._pen.rectangle(outer, outline=colour, width=line)

    def picture(self, left: float, top: float, pixels: np.ndarray) -> None:
        """An image of shape (H, W, 3) from 0 to 1, made one unit wide and high."""
        from PIL import Image

        image = Image.fromarray(np.round(255 * pixels).astype(np.uint8))
        self.image.paste(image.resize((_SIDE, _SIDE)), (round(left * _SIDE), round(top * _SIDE)))


@cache
def _font(size: int, bold: bool) -> "FreeTypeFont":
    import matplotlib
    from PIL import ImageFont

    name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    path = Path(matplotlib.get_data_path(), "fonts", "ttf", name)
    return ImageFont.truetype(path, size * DOTS_PER_INCH / 72)


class _Row:
    """One task, laid out."""

    def __init__(self, episode: EpisodePicture) -> None:
        self.episode = EpisodePicture(*(np.asarray(array) for array in episode))
        self.classes = np.unique(self.episode.support_labels)
        self.of_each = max(int((self.episode.support_labels == c).sum()) for c in self.classes)
        across = min(len(self.classes), _ACROSS)
        bands = -(-len(self.classes) // _ACROSS)
        self.shots = min(self.of_each, _SHOTS, max(1, 6 // bands))
        self.across = across
        self.band_height = _LABEL + self.shots * _PITCH
        self.queries = _spread(self.episode.query_labels, _QUERIES)
        # Beside a support set of several lines the queries take two.
        lines = 1 if bands * self.shots == 1 else 2
        self.query_across = max(1, -(-len(self.queries) // lines))
        self.support_width = across * _PITCH
        self.query_width = self.query_across * _PITCH + 0.2
        query_lines = -(-len(self.queries) // self.query_across)
        self.height = max(bands * self.band_height, _LABEL + query_lines * (_PITCH + _LABEL))

    def draw(self, paper: _Paper, number: int, top: float, query_left: float) -> None:
        """Draws the task with its upper edge at `top`."""
        episode = self.episode
        right = episode.predicted == episode.query_labels
        paper.text(0.3, top + _LABEL + 0.35, f"Task {number}", 10, bold=True)
        paper.text(0.3, top + _LABEL + 0.75, f"{100 * right.mean():.0f}% right", 9)
        for place, label in enumerate(self.classes):
            left = _MARGIN + place % _ACROSS * _PITCH
            upper = top + place // _ACROSS * self.band_height
            paper.text(left + 0.5, upper + 0.2, _letter(label), 8, anchor="mm")
            images = episode.support_images[episode.support_labels == label][: self.shots]
            for shot, image in enumerate(images):
                self._image(paper, image, left, upper + _LABEL + shot * _PITCH, GREY, _THIN)
        for place, query in enumerate(self.queries):
            left = query_left + place % self.query_across * _PITCH
            upper = top + _LABEL + place // self.query_across * (_PITCH + _LABEL)
            colour = GREEN if right[query] else RED
            self._image(paper, episode.query_images[query], left, upper, colour, _THICK)
            answer, truth = _letter(episode.predicted[query]), _letter(episode.query_labels[query])
            told = answer if right[query] else f"{answer}, not {truth}"
            paper.text(left + 0.5, upper + 1.24, told, 8, colour, anchor="mm")

    def _image(
        self, paper: _Paper, image: np.ndarray, left: float, top: float, colour: str, line: int
    ) -> None:
        support = self.episode.support_images
        low, high = float(support.min()), float(support.max())
        with np.errstate(invalid="ignore"):  # infinities
            shown = np.clip((image - low) / (high - low or 1.0), 0, 1)
        shown = np.nan_to_num(shown).transpose(1, 2, 0)
        paper.picture(left, top, np.broadcast_to(shown, (*shown.shape[:2], 3)))
        paper.frame(left, top, 1, colour, line)


def _head(paper: _Paper, title: str, row: _Row, query_left: float) -> None:
    paper.text(0.3, 0.6, title, 13, bold=True)
    examples = f"{row.of_each} example{'' if row.of_each == 1 else 's'} of each class"
    if row.shots < row.of_each:
        examples += f", {row.shots} are shown"
    drawn = f"{len(row.queries)} of {len(row.episode.query_labels)} are shown"
    for left, name, what in (
        (_MARGIN, "Support", f"what it learns from, {examples}"),
        (query_left, "Query", f"new images, {drawn}"),
    ):
        paper.text(left, 1.35, name, 11, bold=True)
        paper.text(left, 1.75, what, 9)


def _foot(paper: _Paper, top: float) -> None:
    for left, colour, what in (
        (0.3, GREEN, "answered right"),
        (3.3, RED, "answered wrong: the answer, not the truth"),
    ):
        paper.frame(left, top, 0.34, colour, _THICK)
        paper.text(left + 0.55, top + 0.26, what, 9)
    told = "The letters name the classes of one task; the next task has other classes."
    paper.text(0.3, top + 0.85, told, 9)


def _letter(label: int) -> str:
    """The class as a person calls it: A to Z, then AA, AB, …"""
    quotient, rest = divmod(int(label), 26)
    return (_letter(quotient - 1) if quotient else "") + string.ascii_uppercase[rest]


def _spread(labels: np.ndarray, limit: int) -> np.ndarray:
    """Places of at most `limit` queries, spread over the classes and ordered by class."""
    occurrence = np.zeros(len(labels), dtype=np.int64)
    for label in np.unique(labels):
        of_class = labels == label
        occurrence[of_class] = np.arange(of_class.sum())
    by_turn = np.lexsort((labels, occurrence))
    ways = len(np.unique(labels))
    if ways > limit:
        by_turn = by_turn[np.linspace(0, ways - 1, limit).round().astype(int)]
    chosen = by_turn[:limit]
    return chosen[np.argsort(labels[chosen], kind="stable")]
