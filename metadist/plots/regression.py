"""Plots of predictions for regression tasks before and after adaptation."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from metadist.plots.style import (
    BLUE,
    GREY,
    INK,
    ORANGE,
    make_axes,
    new_figure,
    save_figure,
    style_axes,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMNS = 3


class RegressionData(NamedTuple):
    """One regression task with scalar inputs and outputs, n support and m query points.

    Arrays of the support set have shape (n,) or (n, 1), all others (m,) or (m, 1).

    Attributes:
        support_inputs: the inputs of the support set.
        support_targets: the targets of the support set.
        query_inputs: the inputs of the query set, in any order.
        query_targets: the targets of the query set.
        predictions_before: the predictions for the query set before adaptation; may be empty.
        predictions_after: the predictions for the query set after adaptation.
    """

    support_inputs: np.ndarray
    support_targets: np.ndarray
    query_inputs: np.ndarray
    query_targets: np.ndarray
    predictions_before: np.ndarray
    predictions_after: np.ndarray


def plot_regression_tasks(tasks: Sequence[RegressionData], path: Path, title: str) -> Path:
    """Plots one panel per task.

    Args:
        tasks: the tasks, at least one and at most about nine.
        path: the PNG file to write.
        title: the title, in one line.

    Returns:
        `path`.

    Raises:
        UserError: the file cannot be written.
    """
    columns = 2 if len(tasks) == 4 else min(len(tasks), _COLUMNS)
    rows = -(-len(tasks) // columns)
    figure = new_figure(max(4.2 * columns, 6.4), 3.1 * rows + 1.0, title)
    grid = make_axes(figure, rows, columns, len(tasks))
    for index, (axes, task) in enumerate(zip(grid, tasks, strict=True)):
        _plot_task(axes, index + 1, task)
        if index % columns == 0:
            axes.set_ylabel("output")
        if index + columns >= len(tasks):
            axes.set_xlabel("input")
    figure.legend(
        *grid[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=2 if columns == 1 else 4,
        fontsize=9,
        frameon=False,
    )
    return save_figure(figure, path)


def _plot_task(axes: "Axes", number: int, task: RegressionData) -> None:
    flat = RegressionData(*(np.asarray(array, dtype=np.float64).ravel() for array in task))
    order = np.argsort(flat.query_inputs, kind="stable")
    inputs, targets = flat.query_inputs[order], flat.query_targets[order]
    after, before = flat.predictions_after[order], flat.predictions_before
    before = before[order] if len(before) else before
    marker = "o" if len(inputs) < 3 else None  # a single point draws no line
    for label, values, color, style, width in (
        ("truth", targets, INK, "-", 1.3),
        ("before adaptation", before, GREY, ":", 1.6),
        ("after adaptation", after, BLUE, "--", 2),
    ):
        if not len(values):
            continue
        axes.plot(
            inputs,
            values,
            color=color,
            linestyle=style,
            linewidth=width,
            marker=marker,
            label=label,
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
    errors = [np.mean((each - targets) ** 2) for each in (before, after) if len(each)]
    mse = " → ".join(f"{error:.3g}" for error in errors)
    axes.set_title(f"task {number}: MSE {mse}", fontsize=10)
    style_axes(axes)
