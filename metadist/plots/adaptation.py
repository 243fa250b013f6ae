"""Plots of the adaptation to a curve by number of inner steps, one column per learner."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from metadist.metrics import counted
from metadist.plots.style import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    PURPLE,
    RED,
    new_figure,
    save_figure,
    style_axes,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LINES = ((GREEN, ":"), (BLUE, "--"), (ORANGE, "-"), (RED, "-."))


class AdaptationData(NamedTuple):
    """The predictions of a learner for one curve.

    Attributes:
        inputs: the inputs, ascending, shape (m,).
        targets: the values of the curve at `inputs`, shape (m,).
        support_inputs: the inputs of the support set, shape (n,).
        support_targets: the targets of the support set, shape (n,).
        predictions: the predictions at `inputs`, shape (m,), by number of inner steps; 0 is before
            adaptation.
    """

    inputs: np.ndarray
    targets: np.ndarray
    support_inputs: np.ndarray
    support_targets: np.ndarray
    predictions: Mapping[int, np.ndarray]


def plot_adaptation(rows: Sequence[Mapping[str, AdaptationData]], path: Path, title: str) -> Path:
    """Plots one row per curve with one column per learner, as in figure 2 of MAML's paper.

    Args:
        rows: for each curve the data of each learner by name, with the same names in every row.
        path: the PNG file to write.
        title: the title, in one line.

    Returns:
        `path`.

    Raises:
        UserError: the file cannot be written.

    Source: Finn et al. (2017), arXiv 1703.03400.
    """
    columns = len(rows[0])
    figure = new_figure(5.2 * columns, 3.5 * len(rows) + 1.1, title)
    grid = figure.subplots(len(rows), columns, squeeze=False, sharex=True, sharey="row")
    for axes_row, row in zip(grid, rows, strict=True):
        _set_limits(axes_row[0], row.values())
        for axes, (name, data) in zip(axes_row, row.items(), strict=True):
            _plot_learner(axes, name, data)
        axes_row[0].set_ylabel("output")
    for axes in grid[-1]:
        axes.set_xlabel("input")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=len(labels), fontsize=9, frameon=False
    )
    return save_figure(figure, path)


def _plot_learner(axes: "Axes", name: str, data: AdaptationData) -> None:
    axes.plot(data.inputs, data.targets, color=INK, linewidth=2.6, alpha=0.35, label="truth")
    errors = []
    for index, (steps, values) in enumerate(data.predictions.items()):
        color, style = _LINES[index % len(_LINES)]
        label = f"after {counted(steps, 'step')}" if steps else "before"
        axes.plot(data.inputs, values, style, color=color, linewidth=1.7, label=label)
        errors.append(f"{np.mean((values - data.targets) ** 2):.2g}")
    axes.scatter(
        data.support_inputs,
        data.support_targets,
        color=PURPLE,
        marker="^",
        s=44,
        zorder=3,
        label="points used",
    )
    axes.set_title(f"{name}: MSE {' → '.join(errors)}", fontsize=10, parse_math=False)
    style_axes(axes)


def _set_limits(axes: "Axes", row: Iterable[AdaptationData]) -> None:
    """Fits the limits to the predictions; cuts off diverging ones to keep the curve visible."""
    target_height, prediction_height = 0.0, 0.0
    for data in row:
        predictions = np.concatenate(list(data.predictions.values()))
        finite = predictions[np.isfinite(predictions)]
        target_height = max(target_height, float(np.abs(data.targets).max()))
        prediction_height = max(prediction_height, float(np.abs(finite).max(initial=0.0)))
    height = 1.1 * max(target_height, min(prediction_height, 2 * target_height + 2))
    axes.set_ylim(-height, height)
