"""Reproduce the papers' tables: runs, one table, and the learning curves beside each other.

Presets are those of conf/experiment, or a dataset (omniglot, mini_imagenet, sinusoid) for all of
its presets, or all. Words with = are passed on to every run. What was interrupted goes on; what
is finished is skipped. The table is made of every run in the directory.
"""

import argparse
import functools
import shlex
import sys
from collections.abc import Iterable, Sequence, Set
from pathlib import Path

from reproduction.cells import Cell, choose, compose, load_cells
from reproduction.gather import find, rows_of
from reproduction.pictures import draw_curves, draw_pair, draw_sinusoids
from reproduction.runs import Planned, Runner
from reproduction.table import csv_text, markdown

from metadist.cli import exit_status
from metadist.errors import UserError

TABLE = "table.md"
_OWN_OPTIONS = {
    "seed": "--seeds",
    "trainer.iterations": "--iterations or --fraction",
    "experiment": "the preset's name",
}
DATA = "table.csv"


def main(words: Sequence[str] | None = None) -> int:
    """Read the command line, run, write the table; the exit status."""
    options = _parser().parse_intermixed_args(words)
    return exit_status(lambda: _run(options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="experiments/reproduce.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("words", nargs="*", metavar="PRESET or KEY=VALUE", help="what to run, and options for it")
    add("--list", action="store_true", help="list the presets with the papers' figures, and end")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--fraction", type=float, default=1.0, help="of the preset's iterations")
    length.add_argument("--iterations", type=int, help="of every run instead")
    add("--seeds", type=int, default=1, help="runs of each preset: seeds 0, 1, … (default 1)")
    add("--workers", type=int, default=1, help="processes of each run (default 1)")
    add("--jobs", type=int, default=1, help="runs at a time (default 1)")
    where = "where a dataset lies; may be given for several, and DATASET= left out for one"
    add("--root", action="append", default=[], metavar="[DATASET=]DIR", help=where)
    add("--directory", type=Path, default=Path("outputs/reproduction"), help="of runs and table")
    add("--table-only", action="store_true", help="run nothing: the table of what is there")
    add("--folders", type=Path, nargs="+", default=[], help="look for runs here too")
    figure = "draw the figure of MAML's paper from two run folders, and end"
    add("--sinusoid", type=Path, nargs=2, metavar=("MAML", "PRETRAINED"), help=figure)
    return parser


def _run(options: argparse.Namespace) -> int:
    cells, directory = load_cells(), options.directory.resolve()
    if options.list:
        return _list(cells.values())
    if options.sinusoid:
        maml, pretrained = (each.resolve() for each in options.sinusoid)
        path = draw_pair({"MAML": maml, "pretrained": pretrained}, directory / "sinusoid.png")
        print(path)
        return 0
    chosen = choose(cells, [word for word in options.words if "=" not in word])
    runner = None
    if not options.table_only:
        roots = _roots(options.root, chosen, {cell.dataset for cell in cells.values()})
        planned = _planned(options, chosen, directory)
        runner = Runner(options.workers, options.jobs, roots, _say)
        runner.carry_out(planned)
    found = find([directory, *options.folders], cells)
    if not found and not (runner and runner.refused):
        raise UserError(f"there is no run of a preset in {directory}: name presets, or all.")
    rows = rows_of(found, {name: _published(name) for name in {f.cell.preset for f in found}})
    told = shlex.join(["python", "experiments/reproduce.py", *sys.argv[1:]])
    text = markdown(rows, told)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / TABLE).write_text(text, encoding="utf-8")
        (directory / DATA).write_text(csv_text(rows), encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"the table could not be written to {directory} ({error.strerror}): make room there, "
            "and start again with --table-only."
        ) from None
    print(text, directory / TABLE, directory / DATA, sep="\n", flush=True)
    for path in filter(None, [draw_curves(found, directory), *draw_sinusoids(found, directory)]):
        print(path)
    if runner is not None and runner.stopped:
        return 128 + runner.stopped
    refused = runner is not None and runner.refused
    return 1 if refused or any(row.failures for row in rows) else 0


def _planned(options: argparse.Namespace, chosen: Sequence[Cell], directory: Path) -> list[Planned]:
    """The runs that the command line asks for.

    Raises:
        UserError: nothing is asked for, or numbers that do not fit.
    """
    if not chosen:
        raise UserError("name presets of conf/experiment, a dataset, or all; --list shows them.")
    for name in ("seeds", "workers", "jobs", "fraction"):
        if not getattr(options, name) > 0:
            raise UserError(f"--{name} {getattr(options, name)} does not fit: it must be above 0.")
    if options.iterations is not None and options.iterations < 1:
        raise UserError(f"--iterations {options.iterations} does not fit: it must be above 0.")
    given = tuple(word for word in options.words if "=" in word)
    for word in given:
        key = word.lstrip("+").partition("=")[0]
        if key in _OWN_OPTIONS:
            raise UserError(f"{word} would belie what the table says: use {_OWN_OPTIONS[key]}.")
    planned = []
    for cell in chosen:
        iterations = options.iterations
        if iterations is None:
            iterations = max(1, round(options.fraction * _published(cell.preset)))
        for seed in range(options.seeds):
            folder = directory / cell.preset / str(iterations) / f"seed{seed}"
            planned.append(Planned(cell.preset, cell.dataset, seed, iterations, given, folder))
    return planned


@functools.cache
def _published(preset: str) -> int:
    """The iterations of a preset."""
    return int(compose([f"+experiment={preset}"])["trainer"]["iterations"])


def _roots(words: Sequence[str], chosen: Sequence[Cell], known: Set[str]) -> dict[str, str]:
    """Where the datasets lie, by name.

    Args:
        words: of `--root`.
        chosen: the cells to run.
        known: the names of all datasets.

    Raises:
        UserError: a dataset that there is not, or a directory for no dataset in particular, where
            there are several.
    """
    having = list(dict.fromkeys(c.dataset for c in chosen if c.dataset != "sinusoid"))
    found = {}
    for word in words:
        name, _, folder = word.partition("=")
        if name not in known:
            if folder and "/" not in name:
                raise UserError(
                    f"--root {word} names no dataset: the presets know "
                    f"{', '.join(sorted(known - {'sinusoid'}))}."
                )
            name, folder = "", word
        if not name and len(having) > 1:
            raise UserError(
                f"--root {word} does not say of which dataset, and there are {' and '.join(having)}"
                f": give each one's, as in --root {having[0]}={word}."
            )
        for dataset in [name] if name else having:
            found[dataset] = str(Path(folder).expanduser().resolve())
    return found


def _list(cells: Iterable[Cell]) -> int:
    for cell in cells:
        accuracy = cell.metric == "accuracy"
        figures = [
            f"{100 * value:.2f}%" if accuracy else f"MSE {value} at {steps} inner steps"
            for steps, value in cell.figures.items()
            if value is not None
        ]
        told = f"{', '.join(figures)}; {cell.source}" if figures else cell.remark
        print(f"{cell.preset:<36}{told}")
    return 0


def _say(text: str) -> None:
    print(text, flush=True)
