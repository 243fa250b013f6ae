"""Reproduce published results: runs, a table, and learning curves.

PRESET is a preset in conf/experiment, a dataset (omniglot, mini_imagenet, sinusoid) for all of its
presets, or all. KEY=VALUE is an override of every run. Interrupted runs are resumed, finished ones
are skipped. The table covers every run in the directory.
"""

import argparse
import shlex
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from pathlib import Path

from reproduction.cells import ROOT, Cell, load_cells, select_cells
from reproduction.plots import plot_curves, plot_pair, plot_sinusoids
from reproduction.quick import run_quick
from reproduction.records import README, TABLE, add_record, read_records
from reproduction.rows import Row, Run, aggregate, find_runs
from reproduction.runs import PresetRun, Runner, key_of
from reproduction.table import csv_text, markdown, summary

from metadist.cli import exit_status
from metadist.errors import UserError
from metadist.files import atomic_write
from metadist.reports.published import preset_iterations

TABLE_FILE = "table.md"
DATA_FILE = "table.csv"
_OPTION_OF_KEY = {
    "seed": "--seeds",
    "trainer.iterations": "--iterations or --fraction",
    "experiment": "the preset's name",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, run, and write the table; returns the exit status."""
    options = _parser().parse_intermixed_args(arguments)
    return exit_status(lambda: _run(options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="experiments/reproduce.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("arguments", nargs="*", metavar="PRESET or KEY=VALUE", help="what to run, and overrides")
    add("--list", action="store_true", help="list the presets with the published results and exit")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--fraction", type=float, default=1.0, help="of the preset's iterations")
    length.add_argument("--iterations", type=int, help="of every run, instead of the preset's")
    add("--seeds", type=int, default=1, help="runs of each preset, with seeds 0, 1, … (default 1)")
    add("--workers", type=int, default=1, help="processes of each run (default 1)")
    add("--jobs", type=int, default=1, help="concurrent runs (default 1)")
    root = "directory of a dataset; repeat for several"
    add("--root", action="append", default=[], metavar="DATASET=DIR", help=root)
    add(
        "--directory",
        type=Path,
        default=Path("outputs/reproduction"),
        help="of the runs and the table",
    )
    add("--table-only", action="store_true", help="no runs: write the table of the existing ones")
    record = "copy results and thinned metrics of finished runs of one PRESET into the records"
    add("--record", type=Path, nargs="+", default=[], metavar="RUN", help=record)
    evaluation = (
        "with --record RUN: the test of this file of `metadist evaluate`, not the run's own"
    )
    add("--evaluation", type=Path, metavar="FILE", help=evaluation)
    update = "write the table of the records into " + " and ".join(
        str(path.relative_to(ROOT)) for path in (TABLE, README)
    )
    add("--update-docs", action="store_true", help=update)
    quick = "run each recorded preset briefly and compare with the expected band of accuracy"
    add("--quick", action="store_true", help=quick)
    add("--folders", type=Path, nargs="+", default=[], help="further directories with runs")
    sinusoid = "plot the adaptation of two runs to a sine curve (as in MAML's paper) and exit"
    add("--sinusoid", type=Path, nargs=2, metavar=("MAML", "PRETRAINED"), help=sinusoid)
    return parser


def _run(options: argparse.Namespace) -> int:
    cells, directory = load_cells(), options.directory.resolve()
    if options.list:
        return _list(cells.values())
    if options.sinusoid:
        maml, pretrained = (path.resolve() for path in options.sinusoid)
        print(plot_pair({"MAML": maml, "pretrained": pretrained}, directory / "sinusoid.png"))
        return 0
    selected = select_cells(cells, [arg for arg in options.arguments if "=" not in arg])
    if options.record:
        return _record(selected, options.record, options.evaluation)
    if options.update_docs:
        return _update_docs(cells)
    if options.table_only:
        return _table(options, cells, selected, None)
    overrides = _checked_overrides(options)
    roots = _roots(options.root, {cell.dataset for cell in cells.values()})
    runner = Runner(options.workers, options.jobs, roots, _print)
    if options.quick:
        # Runs of their own: finished ones would not be repeated.
        runs = directory / "quick" / time.strftime("%Y-%m-%d_%H-%M-%S")
        return run_quick(selected or list(cells.values()), runs, runner, _print)
    runner.run(_runs(options, selected, overrides, directory))
    return _table(options, cells, selected, runner)


def _record(selected: Sequence[Cell], runs: Sequence[Path], evaluation: Path | None) -> int:
    if len(selected) != 1:
        raise UserError(
            "--record needs the one preset that the runs are of, as in PRESET --record RUN."
        )
    if evaluation is not None and len(runs) != 1:
        raise UserError("--evaluation is of one run: give --record a single one.")
    for run in runs:
        print(add_record(selected[0], run.resolve(), evaluation=evaluation))
    return 0


def _update_docs(cells: Mapping[str, Cell]) -> int:
    for path, text in documents(cells).items():
        atomic_write(path, text.encode())
        print(path)
    return 0


def _table(
    options: argparse.Namespace,
    cells: Mapping[str, Cell],
    selected: Sequence[Cell],
    runner: Runner | None,
) -> int:
    """Write the table and the plots of the runs in the directory; returns the exit status.

    Args:
        options: the options of the command line.
        cells: all cells.
        selected: the cells on the command line.
        runner: the runner that has run them; None if the table is of existing runs.
    """
    directory = options.directory.resolve()
    runs = find_runs([directory, *options.folders], cells)
    if not runs and not (runner and runner.failed):
        raise UserError(f"no run of a preset in {directory}: name presets, or all.")
    rows = _rows(runs)
    command = shlex.join(["python", "experiments/reproduce.py", *sys.argv[1:]])
    text = markdown(rows, command, _without_run(rows, selected))
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / TABLE_FILE).write_text(text, encoding="utf-8")
        (directory / DATA_FILE).write_text(csv_text(rows), encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"the table cannot be written to {directory} ({error.strerror}): free disk space or "
            "fix permissions, then add --table-only."
        ) from None
    print(text, directory / TABLE_FILE, directory / DATA_FILE, sep="\n", flush=True)
    for path in filter(None, [plot_curves(runs, directory), *plot_sinusoids(runs, directory)]):
        print(path)
    if runner is not None and runner.stopped:
        return 128 + runner.stopped
    failed = runner is not None and runner.failed
    return 1 if failed or any(row.failures for row in rows) else 0


def documents(cells: Mapping[str, Cell]) -> dict[Path, str]:
    """The files that have a table of the records, with their text.

    Raises:
        UserError: README has no marker of the start or of the end of its table.
    """
    rows = _rows(read_records(cells))
    command = "python experiments/reproduce.py --update-docs"
    table = markdown(rows, command, _without_run(rows, cells.values()))
    start, end = f"<!-- {command} -->\n", "<!-- end -->\n"
    before, found_start, remainder = README.read_text(encoding="utf-8").partition(start)
    _, found_end, after = remainder.partition(end)
    if not found_end:
        missing = (end if found_start else start).strip()
        raise UserError(f"{README} has no line {missing}: add it where its table starts or ends.")
    return {TABLE: table, README: before + start + summary(rows) + end + after}


def _rows(runs: Sequence[Run]) -> list[Row]:
    return aggregate(
        runs, {name: preset_iterations(name) for name in {run.cell.preset for run in runs}}
    )


def _without_run(rows: Sequence[Row], cells: Iterable[Cell]) -> list[str]:
    """The cells without a measured result, and the algorithms without a preset."""
    measured = {row.cell.preset for row in rows if row.measured is not None}
    cells = list(cells)
    missing = [cell.preset for cell in cells if cell.preset not in measured]
    if missing:
        presets = load_cells()
        algorithms = sorted(path.stem for path in (ROOT / "conf" / "algorithm").glob("*.yaml"))
        missing += [
            f"algorithm={name} (no preset)"
            for name in algorithms
            if not any(preset.startswith(f"{name}_") for preset in presets)
        ]
    return missing


def _checked_overrides(options: argparse.Namespace) -> tuple[str, ...]:
    """The overrides of every run.

    Raises:
        UserError: a value is invalid, or is given together with `--quick`, which sets it.
    """
    for name in ("seeds", "workers", "jobs", "fraction", "iterations"):
        value = getattr(options, name)
        if value is not None and not value > 0:  # also NaN
            raise UserError(f"--{name} {value} is invalid: it must be greater than 0.")
    overrides = tuple(argument for argument in options.arguments if "=" in argument)
    for override in overrides:
        key = key_of(override)
        if key in _OPTION_OF_KEY:
            raise UserError(f"{override} contradicts the table: use {_OPTION_OF_KEY[key]}.")
    unused = {"seeds": 1, "fraction": 1.0, "iterations": None, "folders": []}
    given = [f"--{name}" for name, default in unused.items() if getattr(options, name) != default]
    if options.quick and (given or overrides):
        raise UserError(
            f"--quick has runs of its own, on which {', '.join((*given, *overrides))} would have "
            "no effect: leave it out."
        )
    return overrides


def _runs(
    options: argparse.Namespace,
    selected: Sequence[Cell],
    overrides: tuple[str, ...],
    directory: Path,
) -> list[PresetRun]:
    """The runs of the command line.

    Raises:
        UserError: there is no preset.
    """
    if not selected:
        raise UserError("name presets of conf/experiment, a dataset, or all; --list shows them.")
    runs = []
    for cell in selected:
        iterations = options.iterations
        if iterations is None:
            iterations = max(1, round(options.fraction * preset_iterations(cell.preset)))
        for seed in range(options.seeds):
            folder = directory / cell.preset / str(iterations) / f"seed{seed}"
            runs.append(PresetRun(cell.preset, cell.dataset, seed, iterations, overrides, folder))
    return runs


def _roots(values: Sequence[str], datasets: Set[str]) -> dict[str, str]:
    """The directories of the datasets, by name.

    Args:
        values: the values of `--root`.
        datasets: the names of all datasets.

    Raises:
        UserError: a value does not begin with the name of a dataset.
    """
    roots = {}
    for value in values:
        name, _, folder = value.partition("=")
        if name not in datasets or not folder:
            raise UserError(
                f"--root {value} names no dataset: give DATASET=DIR, with one of "
                f"{', '.join(sorted(datasets - {'sinusoid'}))}."
            )
        roots[name] = str(Path(folder).expanduser().resolve())
    return roots


def _list(cells: Collection[Cell]) -> int:
    width = max(len(cell.preset) for cell in cells) + 2
    for cell in cells:
        accuracy = cell.metric == "accuracy"
        results = [
            f"{100 * value:.2f}%" if accuracy else f"MSE {value} at {steps} inner steps"
            for steps, value in cell.results.items()
            if value is not None
        ]
        text = f"{', '.join(results)}; {cell.source}" if results else cell.remark
        print(f"{cell.preset:<{width}}{text}")
    return 0


def _print(text: str) -> None:
    print(f"{text}\n", end="", flush=True)  # one write, as several threads print
