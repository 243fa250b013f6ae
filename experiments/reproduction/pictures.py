"""The pictures beside the table: learning curves, and how learners adapt to a sine curve."""

from collections.abc import Sequence
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from reproduction.gather import Found
from yaml import YAMLError

from metadist.config import load_experiment
from metadist.loggers import read_metrics
from metadist.plots import ComparisonData, plot_comparison
from metadist.training import plot_adaptation

CURVES = "learning_curves.png"
ADAPTATION = "sinusoid_{}_points.png"


def draw_curves(found: Sequence[Found], directory: Path) -> Path | None:
    """The learning curves of all runs that have any, in a panel for each task; None if none has."""
    panels: dict[tuple[str, str], dict[str, list]] = {}
    for run in found:
        records = run.directory / "metrics.jsonl"
        if records.exists():
            name = " ".join((run.cell.preset, *run.options))
            lines = panels.setdefault((_column(run), run.cell.metric), {})
            lines.setdefault(f"{name}, {run.iterations:,}", []).append(read_metrics(records))
    if not panels:
        return None
    return plot_comparison(
        [ComparisonData(title, metric, runs) for (title, metric), runs in panels.items()],
        directory / CURVES,
        "Learning curves: validation of each run",
    )


def draw_sinusoids(found: Sequence[Found], directory: Path) -> list[Path]:
    """MAML's figure, for each number of points of which MAML and the pretrained network are there.

    Of several runs the one with the most iterations and the lowest seed is taken; none that
    changed something of its preset.
    """
    best: dict[tuple[str, int], Found] = {}
    for run in sorted(found, key=lambda run: (-run.iterations, run.seed)):
        if run.cell.dataset == "sinusoid" and run.results and not run.options:
            trained = run.results["protocol"].get("inner_steps", 0) > 0
            kind = "MAML" if trained else "pretrained"
            best.setdefault((kind, run.results["protocol"]["shots"]), run)
    drawn = []
    for kind, shots in best:
        if kind == "MAML" and ("pretrained", shots) in best:
            pair = {name: best[name, shots].directory for name in ("MAML", "pretrained")}
            drawn.append(draw_pair(pair, directory / ADAPTATION.format(shots)))
    return drawn


def draw_pair(runs: dict[str, Path], path: Path) -> Path:
    """MAML's figure of some runs, by the name to call them; see `plot_adaptation`."""
    return plot_adaptation(path, {name: load_experiment(run) for name, run in runs.items()})


def _column(run: Found) -> str:
    """The task that a run is of, as a panel's title."""
    protocol = (run.results or {}).get("protocol")
    if protocol is None:
        try:
            saved = OmegaConf.load(run.directory / ".hydra" / "config.yaml")
            protocol = {key: saved.task[key] for key in ("ways", "shots")}
        except (OSError, TypeError, YAMLError, OmegaConfBaseException):
            return run.cell.dataset
    ways = "" if run.cell.metric == "mse" else f" {protocol['ways']}-way"
    return f"{run.cell.dataset}{ways} {protocol['shots']}-shot"
