"""How learners adapt to a curve, step by step and beside each other: the figure of MAML's paper."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from metadist.plots.sheet import (
    BLUE,
    GREEN,
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

_LINES = ((GREEN, ":"), (BLUE, "--"), (ORANGE, "-"), (RED, "-."))


class AdaptationPicture(NamedTuple):
    """A learner on one curve.

    Attributes:
        inputs: where the curve is drawn, shape (m,), rising.
        truth: the curve there, shape (m,).
        support_inputs: the points that were used, shape (n,).
        support_targets: their values, shape (n,).
        predicted: by the number of steps taken (0 is before) the answers at `inputs`.
    """

    inputs: np.ndarray
    truth: np.ndarray
    support_inputs: np.ndarray
    support_targets: np.ndarray
    predicted: Mapping[int, np.ndarray]


def adaptation_panels(
    rows: Sequence[Mapping[str, AdaptationPicture]], path: Path, title: str
) -> Path:
    """Draws a row for each curve, with a panel for each learner.

    Args:
        rows: for each curve the learners' pictures by name, the same names in every row.
        path: the PNG file to write.
        title: one line.

    Returns:
        `path`.

    Raises:
        UserError: if it cannot be written.
    """
    columns = len(rows[0])
    figure = sheet(5.2 * columns, 3.5 * len(rows) + 1.1, title)
    grid = figure.subplots(len(rows), columns, squeeze=False, sharex=True, sharey="row")
    for line, row in zip(grid, rows, strict=True):
        _limits(line[0], row.values())
        for axes, (name, picture) in zip(line, row.items(), strict=True):
            _panel(axes, name, picture)
        line[0].set_ylabel("output")
    for axes in grid[-1]:
        axes.set_xlabel("input")
    handles, labels = grid[0][0].get_legend_handles_labels()
    place = "outside lower center"
    figure.legend(handles, labels, loc=place, ncols=len(labels), fontsize=9, frameon=False)
    return save(figure, path)


def _panel(axes: "Axes", name: str, picture: AdaptationPicture) -> None:
    axes.plot(picture.inputs, picture.truth, color=INK, linewidth=2.6, alpha=0.35, label="truth")
    errors = []
    for (steps, values), (colour, style) in zip(
        picture.predicted.items(), _LINES * len(picture.predicted), strict=False
    ):
        label = f"after {steps} step{'s' if steps > 1 else ''}" if steps else "before"
        axes.plot(picture.inputs, values, style, color=colour, linewidth=1.7, label=label)
        errors.append(f"{np.mean((values - picture.truth) ** 2):.2g}")
    axes.scatter(
        picture.support_inputs,
        picture.support_targets,
        color=PURPLE,
        marker="^",
        s=44,
        zorder=3,
        label="points used",
    )
    axes.set_title(f"{name}: MSE {' → '.join(errors)}", fontsize=10, parse_math=False)
    lighten(axes)


def _limits(axes: "Axes", pictures: Iterable[AdaptationPicture]) -> None:
    """Room for the answers; one that runs away is cut off rather than flattening the truth."""
    truth, answers = 0.0, 0.0
    for picture in pictures:
        found = np.concatenate(list(picture.predicted.values()))
        truth = max(truth, float(np.abs(picture.truth).max()))
        answers = max(answers, float(np.abs(found[np.isfinite(found)]).max(initial=0.0)))
    height = 1.1 * max(truth, min(answers, 2 * truth + 2))
    axes.set_ylim(-height, height)
