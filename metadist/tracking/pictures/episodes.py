"""What the learner makes of classification tasks: what it saw, and what it answered."""

import string
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from metadist.tracking.pictures.sheet import GREEN, GREY, INK, RED, save, sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_QUERIES = 10  # drawn of each task
_SHOTS = 5  # drawn of each class, fewer where there are many classes
_ACROSS = 10  # classes side by side before the support set goes on below

# All in units of one image's side.
_PITCH = 1.16  # from one image to the next
_LABEL = 0.42  # a line of text over or under an image
_MARGIN = 1.5  # left of the support set, for the task's name
_GAP = 0.7  # between support and query
_INCHES = 0.62  # one unit on paper


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
    figure = sheet(width * _INCHES, height * _INCHES)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    _head(axes, title, rows[0], _MARGIN + support_width + _GAP)
    top = head
    for number, row in enumerate(rows, start=1):
        row.draw(axes, number, top, _MARGIN + support_width + _GAP)
        top += row.height + between
    _foot(axes, top)
    # Last, for every image that is drawn sets the limits anew.
    axes.set(xlim=(0, width), ylim=(height, 0), aspect="auto")
    return save(figure, path)


test_episodes.__test__ = False  # pytest takes any test_* that a test module imports for a test


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

    def draw(self, axes: "Axes", number: int, top: float, query_left: float) -> None:
        """Draws the task with its upper edge at `top`."""
        episode = self.episode
        right = episode.predicted == episode.query_labels
        axes.text(0.3, top + _LABEL + 0.35, f"Task {number}", fontsize=10, weight="bold", color=INK)
        told = f"{100 * right.mean():.0f}% right"
        axes.text(0.3, top + _LABEL + 0.75, told, fontsize=9, color=INK)
        for place, label in enumerate(self.classes):
            left = _MARGIN + place % _ACROSS * _PITCH
            upper = top + place // _ACROSS * self.band_height
            _text(axes, left + 0.5, upper + 0.2, _letter(label), INK)
            images = episode.support_images[episode.support_labels == label][: self.shots]
            for shot, image in enumerate(images):
                self._image(axes, image, left, upper + _LABEL + shot * _PITCH, GREY, 0.8)
        for place, query in enumerate(self.queries):
            left = query_left + place % self.query_across * _PITCH
            upper = top + _LABEL + place // self.query_across * (_PITCH + _LABEL)
            colour = GREEN if right[query] else RED
            self._image(axes, episode.query_images[query], left, upper, colour, 2.4)
            answer, truth = _letter(episode.predicted[query]), _letter(episode.query_labels[query])
            told = answer if right[query] else f"{answer}, not {truth}"
            _text(axes, left + 0.5, upper + 1.24, told, colour)

    def _image(
        self, axes: "Axes", image: np.ndarray, left: float, top: float, colour: str, line: float
    ) -> None:
        from matplotlib.patches import Rectangle

        low, high = (
            float(self.episode.support_images.min()),
            float(self.episode.support_images.max()),
        )
        shown = np.clip((image - low) / (high - low or 1.0), 0, 1).transpose(1, 2, 0)
        axes.imshow(
            shown if shown.shape[2] == 3 else shown[..., 0],
            extent=(left, left + 1, top + 1, top),
            cmap="gray",
            vmin=0,
            vmax=1,
            interpolation="antialiased",
        )
        frame = Rectangle((left, top), 1, 1, fill=False, edgecolor=colour, linewidth=line)
        axes.add_patch(frame)


def _head(axes: "Axes", title: str, row: _Row, query_left: float) -> None:
    axes.text(0.3, 0.6, title, fontsize=13, weight="bold", color=INK, parse_math=False)
    examples = f"{row.of_each} example{'' if row.of_each == 1 else 's'} of each class"
    if row.shots < row.of_each:
        examples += f", {row.shots} are shown"
    drawn = f"{len(row.queries)} of {len(row.episode.query_labels)} are shown"
    for left, name, what in (
        (_MARGIN, "Support", f"what it learns from, {examples}"),
        (query_left, "Query", f"new images, {drawn}"),
    ):
        axes.text(left, 1.35, name, fontsize=10.5, weight="bold", color=INK)
        axes.text(left, 1.75, what, fontsize=9, color=INK)


def _foot(axes: "Axes", top: float) -> None:
    from matplotlib.patches import Rectangle

    for left, colour, what in (
        (0.3, GREEN, "answered right"),
        (3.3, RED, "answered wrong: the answer, not the truth"),
    ):
        frame = Rectangle((left, top), 0.34, 0.34, fill=False, edgecolor=colour, linewidth=2.4)
        axes.add_patch(frame)
        axes.text(left + 0.55, top + 0.19, what, fontsize=9, color=INK, va="center")
    told = "The letters name the classes of one task; the next task has other classes."
    axes.text(0.3, top + 0.75, told, fontsize=9, color=INK, va="center")


def _text(axes: "Axes", x: float, y: float, told: str, colour: str) -> None:
    axes.text(x, y, told, fontsize=8, color=colour, ha="center", va="center")


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
