"""A short run of each cell, whose test result must be in an expected band.

This is a regression test of learning: most runs have a few dozen iterations, and without
pretrained weights their results are far from the published ones.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf
from reproduction.cells import HERE, Cell
from reproduction.runs import PresetRun, Runner

from metadist.errors import UserError
from metadist.reports.run_record import RunRecord

BANDS = HERE / "quick.yaml"
_OPTIONS = ("trainer.eval_every=0", "trainer.checkpoint_every=0", "trainer.report=false")


@dataclass(frozen=True)
class Band:
    """The expected result of a short run.

    Attributes:
        iterations: the number of training iterations.
        low: the lowest expected test accuracy (0 to 1) or MSE.
        high: the highest expected test accuracy or MSE.
        tasks: the number of test tasks.
    """

    iterations: int
    low: float
    high: float
    tasks: int = 100


def load_bands() -> dict[str, Band]:
    """All bands by preset."""
    return {str(name): Band(**entry) for name, entry in OmegaConf.load(BANDS).items()}


def run_quick(
    cells: Sequence[Cell], directory: Path, runner: Runner, log: Callable[[str], None]
) -> int:
    """Run the cells that have a band and compare.

    Args:
        cells: the cells.
        directory: the directory of the runs.
        runner: the runner of the runs.
        log: a function that receives a line for each cell.

    Returns:
        The exit status: 0 if every result is in its band, else 1.

    Raises:
        UserError: none of the cells has a band.
    """
    bands = load_bands()
    cells = [cell for cell in cells if cell.preset in bands]
    if not cells:
        raise UserError(f"none of these presets has a band in {BANDS.name}: leave the names out.")
    runs = [
        PresetRun(
            cell.preset,
            cell.dataset,
            0,
            bands[cell.preset].iterations,
            (*_OPTIONS, f"trainer.eval_tasks={bands[cell.preset].tasks}"),
            directory / cell.preset,
        )
        for cell in cells
    ]
    runner.run(runs)
    return max([_compare(cell, run, bands, log) for cell, run in zip(cells, runs, strict=True)])


def _compare(
    cell: Cell, run: PresetRun, bands: Mapping[str, Band], log: Callable[[str], None]
) -> int:
    """Log the comparison of a run with its band; 1 if it is outside or has no result, else 0."""
    band, record = bands[cell.preset], RunRecord(run.directory)
    results = record.results
    if results is None:
        log(f"{cell.preset}: no result: {record.error_line or 'stopped'}")
        return 1
    value = float(results[f"test_{cell.metric}"])
    inside = band.low <= value <= band.high
    log(
        f"{cell.preset}: {cell.metric} {value:.3f}, expected {band.low} to {band.high}"
        f"{'' if inside else ': OUTSIDE'} ({band.iterations} iterations, "
        f"{results['wall_seconds']:.0f} s)"
    )
    return 0 if inside else 1
