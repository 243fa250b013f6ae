"""Plots of the reproduction: learning curves, and adaptation to a sine curve."""

from collections.abc import Sequence
from pathlib import Path

from reproduction.adaptation import plot_adaptation
from reproduction.rows import Run, task_title

from metadist.config import load_experiment
from metadist.errors import UserError
from metadist.plots import ComparisonData, plot_comparison
from metadist.reports import LEARNING_CURVES_FILE

ADAPTATION = "sinusoid_{}_points.png"


def plot_curves(runs: Sequence[Run], directory: Path) -> Path | None:
    """Plot the learning curves of all runs, one panel per task; None if there are none."""
    panels: dict[tuple[str, str], dict[str, list]] = {}
    for run in runs:
        if run.record.metrics:
            name = " ".join((run.cell.preset, *run.options))
            panel = panels.setdefault((panel_title(run), run.cell.metric), {})
            panel.setdefault(f"{name}, {run.iterations:,}", []).append(run.record.metrics)
    if not panels:
        return None
    return plot_comparison(
        [ComparisonData(title, metric, runs) for (title, metric), runs in panels.items()],
        directory / LEARNING_CURVES_FILE,
        "Learning curves (validation)",
    )


def plot_sinusoids(runs: Sequence[Run], directory: Path) -> list[Path]:
    """Plot adaptation to a sine curve (arXiv 1703.03400, figure 2) for each number of shots.

    If there are several runs without options, the run with the most iterations and the lowest seed
    is used. A plot needs a MAML run and a pretrained run.
    """
    best: dict[tuple[str, int], Run] = {}
    for run in sorted(runs, key=lambda run: (-run.iterations, run.seed)):
        if run.cell.dataset == "sinusoid" and run.record.results and not run.options:
            trained = run.record.results["protocol"].get("inner_steps", 0) > 0
            kind = "MAML" if trained else "pretrained"
            best.setdefault((kind, run.record.results["protocol"]["shots"]), run)
    plots = []
    for kind, shots in best:
        if kind == "MAML" and ("pretrained", shots) in best:
            pair = {name: best[name, shots].record.directory for name in ("MAML", "pretrained")}
            plots.append(plot_pair(pair, directory / ADAPTATION.format(shots)))
    return plots


def plot_pair(runs: dict[str, Path], path: Path) -> Path:
    """Plot the adaptation of runs, given by label; see `plot_adaptation`."""
    return plot_adaptation(path, {name: load_experiment(run) for name, run in runs.items()})


def panel_title(run: Run) -> str:
    """The `task_title` of a run; the dataset if the run has no protocol and no configuration."""
    protocol = (run.record.results or {}).get("protocol")
    if protocol is None:
        try:
            return task_title(run.cell, run.record.config["task"])
        except (UserError, KeyError, TypeError):
            return run.cell.dataset
    return task_title(run.cell, protocol)
