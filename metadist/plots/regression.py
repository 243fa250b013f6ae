"""What the learner makes of regression tasks, before and after it adapted."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from metadist.plots.sheet import BLUE, GREY, INK, ORANGE, lighten, panels, save, sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMNS = 3


class RegressionPicture(NamedTuple):
    """One regression task of one input and one output, n support and m query points.

    Every array has shape (n,) or (n, 1), or (m,) or (m, 1).

    Attributes:
        support_inputs: what the learner adapted on.
        support_targets: their true values.
        query_inputs: where it was asked, in any order.
        query_targets: the true values there.
        predicted_before: its answers before it adapted.
        predicted_after: its answers after.
    """

    support_inputs: np.ndarray
    support_targets: np.ndarray
    query_inputs: np.ndarray
    query_targets: np.ndarray
    predicted_before: np.ndarray
    predicted_after: np.ndarray


def regression_tasks(tasks: Sequence[RegressionPicture], path: Path, title: str) -> Path:
    """Draws a panel for each task.

    Args:
        tasks: at least one, a handful.
        path: the PNG file to write.
        title: one line.

    Returns:
        `path`.

    Raises:
        UserError: if it cannot be written.
    """
    columns = 2 if len(tasks) == 4 else min(len(tasks), _COLUMNS)
    rows = -(-len(tasks) // columns)
    figure = sheet(max(4.2 * columns, 6.4), 3.1 * rows + 1.0, title)
    grid = panels(figure, rows, columns, len(tasks))
    for place, (axes, task) in enumerate(zip(grid, tasks, strict=True)):
        _panel(axes, place + 1, task)
        if place % columns == 0:
            axes.set_ylabel("output")
        if place + columns >= len(tasks):
            axes.set_xlabel("input")
    figure.legend(
        *grid[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=2 if columns == 1 else 4,
        fontsize=9,
        frameon=False,
    )
    return save(figure, path)


def _panel(axes: "Axes", number: int, task: RegressionPicture) -> None:
    flat = RegressionPicture(*(np.asarray(array, dtype=np.float64).ravel() for array in task))
    order = np.argsort(flat.query_inputs, kind="stable")
    inputs, targets = flat.query_inputs[order], flat.query_targets[order]
    before, after = flat.predicted_before[order], flat.predicted_after[order]
    # A single query point would draw no line.
    marker = "o" if len(inputs) < 3 else None
    axes.plot(inputs, targets, color=INK, linewidth=1.3, marker=marker, label="truth")
    axes.plot(
        inputs,
        before,
        color=GREY,
        linestyle=":",
        linewidth=1.6,
        marker=marker,
        label="before adaptation",
    )
    axes.plot(
        inputs,
        after,
        color=BLUE,
        linestyle="--",
        linewidth=2,
        marker=marker,
        label="after adaptation",
    )
    axes.scatter(
        flat.support_inputs,
        flat.support_targets,
        color=ORANGE,
        marker="^",
        s=48,
        zorder=3,
        label="support points, adapted on",
    )
    mse_before, mse_after = np.mean((before - targets) ** 2), np.mean((after - targets) ** 2)
    axes.set_title(f"task {number}: MSE {mse_before:.3g} → {mse_after:.3g}", fontsize=10)
    lighten(axes)
