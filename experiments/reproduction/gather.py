"""What lies in the folders of runs, and what it comes to for each cell."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reproduction.cells import Cell
from reproduction.runs import PLAN, failure, has_failed, identity_of, plan_of

from metadist.reports import is_runtime_key, protocol_differences, read_results

_HARMLESS = re.compile(
    r"\+experiment=|seed=|trainer\.(iterations|checkpoint_every)=|strategy|\+partition|device=|threads="
)
"""Overrides by which the preset stays what it is, beside those of `is_runtime_key`."""

_VALIDATION = re.compile(r"trainer\.(eval_every|validation_tasks)=")
"""Overrides by which it stays so unless validation chooses the checkpoint."""

_ROUNDING = 1e-9
"""Figures that were written in decimals agree as far as that."""


@dataclass(frozen=True)
class Found:
    """One run's folder.

    Attributes:
        directory: where.
        cell: what it is of.
        seed: the run's.
        iterations: that it was to train.
        options: overrides of the preset, but for those that change no figure.
        results: its results.json, None where it has not come to an end.
    """

    directory: Path
    cell: Cell
    seed: int
    iterations: int
    options: tuple[str, ...]
    results: dict[str, Any] | None

    @property
    def failed(self) -> bool:
        """Whether an error ended it; a run that goes on, or was stopped, has not failed."""
        return has_failed(self.directory, self.results is not None)

    @property
    def trouble(self) -> str:
        """Why it has failed, or what it said last; "" if it has finished."""
        return failure(self.directory) if self.failed or not self.results else ""

    @property
    def finished(self) -> bool:
        """Whether it has ended well, with results."""
        return self.results is not None and not self.failed


@dataclass(frozen=True)
class Row:
    """A line of the table: a cell, its runs of one length, and one of its figures.

    Attributes:
        cell: which.
        options: overrides of the preset.
        steps: after how many inner steps; None after the last.
        iterations: of each run.
        published_iterations: what the preset has; None where it cannot be told.
        paper: the paper's figure, None where there is none.
        ours: mean over seeds, None where no run has finished.
        ci95: half the width of the 95% interval over tasks, the mean over seeds.
        lowest: of the seeds.
        highest: of the seeds.
        seeds: those that finished with this figure.
        failures: by seed, why others failed.
        unfinished: by seed, what the rest, which go on or were stopped, said last.
        seconds: wall time of a run, the mean.
        world: workers and strategy.
        protocol: of the runs.
        method: what is told of the algorithm.
        differs: where the paper's protocol is known to be another: key -> (paper, ours).
        uneven: what the seeds' protocols or configurations differ in.
    """

    cell: Cell
    options: tuple[str, ...]
    steps: int | None
    iterations: int
    published_iterations: int | None
    paper: float | None
    ours: float | None
    ci95: float | None
    lowest: float | None
    highest: float | None
    seeds: tuple[int, ...]
    failures: dict[int, str]
    unfinished: dict[int, str]
    seconds: float | None
    world: str
    protocol: dict[str, Any]
    method: dict[str, Any]
    differs: dict[str, tuple[Any, Any]]
    uneven: dict[str, dict[str, Any]]

    @property
    def name(self) -> str:
        """The cell, what was changed of it and, if it has several figures, which."""
        step = "" if self.steps is None else f", {self.steps} step{'s' if self.steps > 1 else ''}"
        return self.label + step

    @property
    def label(self) -> str:
        """The cell and what was changed of it."""
        return " ".join((self.cell.preset, *self.options))

    @property
    def outcome(self) -> str:
        """Whether the paper's figure is reached: at least the lower end of its interval."""
        if self.ours is None:
            nothing = "unfinished" if self.unfinished else "not tested after so many steps"
            return "FAILED" if self.failures else nothing
        others = f"; {len(self.failures)} of the seeds FAILED" if self.failures else ""
        if self.unfinished:
            others += f"; {len(self.unfinished)} of the seeds unfinished"
        if self.paper is None:
            return f"nothing to compare with{others}"
        sign = -1 if self.cell.metric == "mse" else 1
        missing = sign * (self.paper - self.ours)
        if missing <= (self.cell.interval or 0.0) + _ROUNDING:
            return f"reached{' under another protocol' * bool(self.differs)}{others}"
        short = f"{100 * missing:.2f} points below" if sign > 0 else f"{missing:.3f} above"
        return f"NOT reached: {short} the paper's{others}"


def find(directories: Iterable[Path], cells: Mapping[str, Cell]) -> list[Found]:
    """Every run of a known preset in some directories and below, in the order of the cells.

    Raises:
        UserError: the results of one cannot be read.
    """
    marks = (PLAN, ".hydra")
    folders = {
        path.parent.resolve()
        for directory in directories
        for mark in marks
        for path in directory.rglob(mark)
    }
    found = []
    for folder in sorted(folders):
        plan = plan_of(folder)
        if plan is None or plan["preset"] not in cells:
            continue
        results = read_results(folder)
        options = tuple(sorted(word for word in plan["options"] if _matters(word, plan["options"])))
        cell = cells[plan["preset"]]
        found.append(Found(folder, cell, plan["seed"], plan["iterations"], options, results))
    order = {name: place for place, name in enumerate(cells)}
    return sorted(found, key=lambda f: (order[f.cell.preset], f.options, f.iterations, f.seed))


def _matters(word: str, options: Sequence[str]) -> bool:
    if _VALIDATION.match(word):
        return "trainer.test_checkpoint=best" in options
    return not (_HARMLESS.match(word) or is_runtime_key(word.lstrip("+").partition("=")[0]))


def rows_of(found: Sequence[Found], lengths: Mapping[str, int]) -> list[Row]:
    """The table's rows.

    Args:
        found: the runs.
        lengths: the published iterations of each preset.
    """
    groups: dict[tuple[str, tuple[str, ...], int], list[Found]] = {}
    for run in found:
        groups.setdefault((run.cell.preset, run.options, run.iterations), []).append(run)
    return [
        _row(runs, steps, lengths.get(preset))
        for (preset, *_), runs in groups.items()
        for steps in runs[0].cell.rows()
    ]


def _row(runs: Sequence[Found], steps: int | None, length: int | None) -> Row:
    cell = runs[0].cell
    done = list({run.seed: run for run in runs if run.finished}.values())
    ended = {run.seed for run in done}
    rest = [run for run in runs if run.seed not in ended]
    all_figures = {run.seed: _figure(run, steps) for run in done}
    figures = {seed: figure for seed, figure in all_figures.items() if figure is not None}
    values = [mean for mean, _ in figures.values()]
    protocols = {f"seed {run.seed}": run.results["protocol"] for run in done}
    protocol = next(iter(protocols.values()), {})
    return Row(
        cell=cell,
        options=runs[0].options,
        steps=steps,
        iterations=runs[0].iterations,
        published_iterations=length,
        paper=cell.figures.get(steps),
        ours=_mean(values),
        ci95=_mean([ci95 for _, ci95 in figures.values()]),
        lowest=min(values, default=None),
        highest=max(values, default=None),
        seeds=tuple(figures),
        failures={run.seed: run.trouble for run in rest if run.failed},
        unfinished={run.seed: run.trouble for run in rest if not run.failed},
        seconds=_mean([run.results["wall_seconds"] for run in done]),
        world=", ".join(
            dict.fromkeys(f"{r.results['strategy']} on {r.results['world_size']}" for r in done)
        ),
        protocol=protocol,
        method=next((run.results.get("method", {}) for run in done), {}),
        differs={
            key: (theirs, here)
            for key, theirs in cell.protocol.items()
            # What training has in common with the test is not named of training.
            if (here := protocol.get(key, protocol.get(key.removeprefix("train_")))) is not None
            and here != theirs
        },
        uneven=protocol_differences(protocols) | protocol_differences(_configurations(done)),
    )


def _configurations(runs: Sequence[Found]) -> dict[str, dict[str, str]]:
    """What the numbers of each run follow from, by dotted key, as far as the runs say it."""
    kept = {f"seed {run.seed}": identity_of(run.directory) for run in runs}
    return {name: identity for name, identity in kept.items() if identity}


def _figure(run: Found, steps: int | None) -> tuple[float, float] | None:
    """Mean and interval; None where the run was not tested after so many steps."""
    results, metric = run.results or {}, run.cell.metric
    if steps is None:
        return _numbers(results[f"test_{metric}"], results["ci95"])
    for row in results.get(f"test_{metric}_by_steps", []):
        if row["steps"] == steps:
            return _numbers(row["mean"], row["ci95"])
    return None


def _numbers(mean: float | str, ci95: float | str) -> tuple[float, float]:
    """What is not finite is written as text in JSON."""
    return float(mean), float(ci95)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def beside(rows: Sequence[Row]) -> dict[str, dict[str, dict[str, Any]]]:
    """What the cells differ in that stand beside each other: same dataset, ways and shots.

    Returns:
        By the name of the column, such as `omniglot 5-way 1-shot`: `protocol_differences` of its
        presets.
    """
    columns: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        if row.protocol:
            p = row.protocol
            ways = "" if row.cell.metric == "mse" else f" {p['ways']}-way"
            name = f"{row.cell.dataset}{ways} {p['shots']}-shot"
            columns.setdefault(name, {})[row.label] = p
    found = {name: protocol_differences(protocols) for name, protocols in columns.items()}
    return {name: differences for name, differences in found.items() if differences}
