"""How a run learned: loss and accuracy, or MSE, against the iteration."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from metadist.plots.sheet import BLUE, GREEN, ORANGE, lighten, save, sheet, smoothed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LABELS = {"loss": "Loss", "accuracy": "Accuracy", "mse": "Mean squared error"}


def learning_curves(
    records: Sequence[Mapping[str, object]],
    path: Path,
    title: str,
    test: tuple[float, float] | None = None,
) -> Path:
    """Draws a panel for the loss and one for the accuracy, or MSE, if there is any.

    Args:
        records: those of a run, training and validation in any order.
        path: the PNG file to write.
        title: one line.
        test: the final accuracy (0 to 1) or MSE, and half the width of its 95% interval.

    Returns:
        `path`.

    Raises:
        UserError: if it cannot be written.
    """
    metric = next(
        (m for m in ("accuracy", "mse") if any(r.keys() & _names(m) for r in records)), None
    )
    panels = ["loss"] if metric is None else ["loss", metric]
    figure = sheet(5.6 * len(panels), 3.9, title, columns=len(panels))
    grid = figure.subplots(1, len(panels), sharex=True, squeeze=False)[0]
    for axes, panel in zip(grid, panels, strict=True):
        _panel(axes, records, panel, test if panel == panels[-1] and metric else None)
    iterations = {int(record["iteration"]) for record in records}
    if len(iterations) == 1:  # a point has no extent to take the limits from
        grid[0].set_xlim(min(iterations) - 1, max(iterations) + 1)
    return save(figure, path)


def _names(metric: str) -> set[str]:
    return {f"train_{metric}", f"validation_{metric}"}


def _panel(
    axes: "Axes",
    records: Sequence[Mapping[str, object]],
    metric: str,
    test: tuple[float, float] | None,
) -> None:
    iterations, values = _series(records, f"train_{metric}")
    if len(iterations):
        few = len(iterations) < 20
        axes.plot(
            iterations,
            values,
            color=BLUE,
            alpha=1 if few else 0.25,
            linewidth=1,
            marker="o" if few else None,
            markersize=4,
            label="training" if few else "training, each iteration",
        )
        if not few:
            smooth = smoothed(values, window=max(5, len(values) // 25))
            axes.plot(iterations, smooth, color=BLUE, linewidth=1.8, label="training, smoothed")
    iterations, values = _series(records, f"validation_{metric}")
    if len(iterations):
        axes.plot(
            iterations,
            values,
            color=ORANGE,
            linewidth=1.5,
            marker="o",
            markersize=5 if len(iterations) < 40 else 2.5,
            label="validation, unseen classes" if metric == "accuracy" else "validation",
        )
    if test is not None:
        value, spread = test
        told = (
            f"final test: {100 * value:.1f}% ± {100 * spread:.1f}%"
            if metric == "accuracy"
            else f"final test: {value:.3g} ± {spread:.2g}"
        )
        axes.axhline(value, color=GREEN, linestyle="--", linewidth=1.5, label=told)
        axes.axhspan(value - spread, value + spread, color=GREEN, alpha=0.15, linewidth=0)
    _finish(axes, metric)


def _finish(axes: "Axes", metric: str) -> None:
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    axes.set_xlabel("training iteration")
    axes.set_ylabel(_LABELS[metric])
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    if metric == "accuracy":
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        low, high = axes.get_ylim()
        axes.set_ylim(max(low, -0.02), min(high, 1.02))
    lighten(axes)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8.5, frameon=True, framealpha=0.85, edgecolor="none")


def _series(records: Sequence[Mapping[str, object]], name: str) -> tuple[np.ndarray, np.ndarray]:
    """The iterations and values of the records that have `name`, in order."""
    points = sorted((int(r["iteration"]), float(r[name])) for r in records if name in r)
    iterations = np.array([iteration for iteration, _ in points], dtype=np.int64)
    return iterations, np.array([value for _, value in points], dtype=np.float64)
