"""The rows of the table: the runs of a directory, aggregated over seeds for each cell."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reproduction.cells import Cell
from reproduction.runs import fingerprint, relevant_options

from metadist.errors import UserError
from metadist.metrics import counted
from metadist.reports import FAILURE_FILE, OVERRIDES_FILE, protocol_differences
from metadist.reports.published import compare_values, published_differences
from metadist.reports.run_record import RunRecord


@dataclass(frozen=True)
class Run:
    """A run of a cell.

    Attributes:
        record: the record of the run.
        cell: the cell of the run's preset.
        seed: the run's seed.
        iterations: the number of training iterations.
        options: the overrides by which the run differs from its preset.
    """

    record: RunRecord
    cell: Cell
    seed: int
    iterations: int
    options: tuple[str, ...]


@dataclass(frozen=True)
class Row:
    """A row of the table: the runs of a cell with equal options and length.

    Attributes:
        cell: the cell.
        options: the overrides of the preset.
        steps: the number of inner steps of the result; None for the last step.
        iterations: the number of training iterations of each run.
        published_iterations: the preset's number of iterations; None if unknown.
        published: the published result; None if there is none.
        measured: the mean result over seeds; None if no run has finished.
        ci95: half the width of the 95% interval over tasks, averaged over seeds.
        lowest: the minimum over seeds.
        highest: the maximum over seeds.
        seeds: the seeds of the finished runs with this result.
        failures: the errors of failed runs, by seed.
        unfinished: the progress of the other runs, by seed.
        seconds: the mean wall time of a run.
        core_hours: the mean wall time × workers of a run.
        world: the strategy and the number of workers.
        protocol: the protocol of the runs.
        method: the algorithm and options of the runs.
        differences: the keys in which the published protocol differs: key -> (published, measured).
        seed_differences: the keys in which the protocols or configurations of the seeds differ.
    """

    cell: Cell
    options: tuple[str, ...]
    steps: int | None
    iterations: int
    published_iterations: int | None
    published: float | None
    measured: float | None
    ci95: float | None
    lowest: float | None
    highest: float | None
    seeds: tuple[int, ...]
    failures: dict[int, str]
    unfinished: dict[int, str]
    seconds: float | None
    core_hours: float | None
    world: str
    protocol: dict[str, Any]
    method: dict[str, Any]
    differences: dict[str, tuple[Any, Any]]
    seed_differences: dict[str, dict[str, Any]]

    @property
    def name(self) -> str:
        """The preset, the options and, if the cell has several results, the number of steps."""
        step = "" if self.steps is None else f", {counted(self.steps, 'step')}"
        return self.label + step

    @property
    def label(self) -> str:
        """The preset and the options."""
        return " ".join((self.cell.preset, *self.options))

    @property
    def fraction(self) -> float | None:
        """The iterations divided by the preset's iterations; None if these are unknown."""
        return self.iterations / self.published_iterations if self.published_iterations else None

    @property
    def outcome(self) -> str:
        """The comparison with the published result.

        Diverged: a seed has a non-finite result. Reached: the result is at least the lower end of
        the published interval. Otherwise the difference; runs of less than `MIN_FRACTION` of the
        preset's iterations are not compared.
        """
        if self.measured is None:
            missing = "unfinished" if self.unfinished else "not evaluated at this number of steps"
            return "FAILED" if self.failures else missing
        notes = f"; {len(self.failures)} of the seeds FAILED" if self.failures else ""
        if self.unfinished:
            notes += f"; {len(self.unfinished)} of the seeds unfinished"
        if self.published is None:
            return f"no published result{notes}"
        notes += "".join(
            f"; {key.replace('_', ' ')} {measured}, in the paper {published}"
            for key, (published, measured) in self.differences.items()
        )
        kind, text = compare_values(self.cell, self.published, self.measured, self.fraction)
        if kind == "muted":
            text = f"not compared: {100 * (self.fraction or 0.0):.2g}% of the iterations"
        margin = (self.cell.interval or 0.0) + (self.ci95 or 0.0)
        if kind == "bad" and abs(self.published - self.measured) <= margin < math.inf:
            text += ", inside the intervals"
        return f"{text}{notes}"


def find_runs(directories: Iterable[Path], cells: Mapping[str, Cell]) -> list[Run]:
    """All runs of known presets in directories and their subdirectories, in the order of the cells.

    Runs whose configuration cannot be read are left out.
    """
    folders = {
        path.parents[name.count("/")].resolve()
        for directory in directories
        for name in (OVERRIDES_FILE, FAILURE_FILE)
        for path in directory.rglob(name)
    }
    runs = []
    for folder in sorted(folders):
        record = RunRecord(folder)
        try:
            if record.preset not in cells:
                continue
            seed, iterations = (int(record.value(key)) for key in ("seed", "trainer.iterations"))
        except (UserError, ValueError):
            continue
        options = relevant_options(record.overrides)
        runs.append(Run(record, cells[record.preset], seed, iterations, options))
    return sort_runs(runs, cells)


def sort_runs(runs: Iterable[Run], cells: Mapping[str, Cell]) -> list[Run]:
    """Runs in the order of the cells, then by options, length and seed."""
    order = {name: index for index, name in enumerate(cells)}

    def key(run: Run) -> tuple[int, tuple[str, ...], int, int]:
        return order[run.cell.preset], run.options, run.iterations, run.seed

    return sorted(runs, key=key)


def aggregate(runs: Sequence[Run], lengths: Mapping[str, int | None]) -> list[Row]:
    """The rows of the table.

    Args:
        runs: see `find_runs`.
        lengths: the published iterations of each preset.
    """
    groups: dict[tuple[str, tuple[str, ...], int], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.cell.preset, run.options, run.iterations), []).append(run)
    return [
        _row(group, steps, lengths.get(preset))
        for (preset, *_), group in groups.items()
        for steps in group[0].cell.steps()
    ]


def _row(runs: Sequence[Run], steps: int | None, length: int | None) -> Row:
    cell = runs[0].cell
    done = list({run.seed: run for run in runs if run.record.results is not None}.values())
    ended = {run.seed for run in done}
    others = [run for run in runs if run.seed not in ended]
    tested = {run.seed: _result(run, steps) for run in done}
    tested = {seed: result for seed, result in tested.items() if result is not None}
    values = [mean for mean, _ in tested.values()]
    results = [run.record.results for run in done]
    protocols = {f"seed {run.seed}": run.record.results["protocol"] for run in done}
    protocol = next(iter(protocols.values()), {})
    worlds = [f"{each['strategy']} on {each['world_size']}" for each in results]
    return Row(
        cell=cell,
        options=runs[0].options,
        steps=steps,
        iterations=runs[0].iterations,
        published_iterations=length,
        published=cell.results.get(steps),
        measured=_mean(values),
        ci95=_mean([ci95 for _, ci95 in tested.values()]),
        lowest=min(values, default=None),
        highest=max(values, default=None),
        seeds=tuple(tested),
        failures={run.seed: run.record.error_line for run in others if run.record.failed},
        unfinished={run.seed: _progress(run) for run in others if not run.record.failed},
        seconds=_mean([each["wall_seconds"] for each in results]),
        core_hours=_mean([each["wall_seconds"] * each["world_size"] / 3600 for each in results]),
        world=", ".join(dict.fromkeys(worlds)),
        protocol=protocol,
        method=next((each.get("method", {}) for each in results), {}),
        differences=published_differences(cell, protocol),
        seed_differences=protocol_differences(protocols)
        | protocol_differences(_configurations(done)),
    )


def _progress(run: Run) -> str:
    """The last iteration that an unfinished run has recorded."""
    iteration, _ = run.record.iterations
    return f"at iteration {iteration}" if iteration else "no iteration recorded"


def _configurations(runs: Sequence[Run]) -> dict[str, dict[str, str]]:
    """The configuration fingerprints of the runs that have one."""
    saved = {f"seed {run.seed}": fingerprint(run.record.config) for run in runs}
    return {name: keys for name, keys in saved.items() if keys}


def _result(run: Run, steps: int | None) -> tuple[float, float] | None:
    """The mean and interval; None if the run was not evaluated at this number of steps."""
    results, metric = run.record.results or {}, run.cell.metric
    # Non-finite values are strings in results.json.
    if steps is None:
        return float(results[f"test_{metric}"]), float(results["ci95"])
    for row in results.get(f"test_{metric}_by_steps", []):
        if row["steps"] == steps:
            return float(row["mean"]), float(row["ci95"])
    return None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def task_title(cell: Cell, protocol: Mapping[str, Any]) -> str:
    """The dataset, ways and shots of runs of a cell, such as `omniglot 5-way 1-shot`."""
    ways = "" if cell.metric == "mse" else f" {protocol['ways']}-way"
    return f"{cell.dataset}{ways} {protocol['shots']}-shot"


def rows_by_task(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows with a protocol, by `task_title`; one row per cell."""
    tasks: dict[str, dict[tuple[str, int], Row]] = {}
    for row in rows:
        if row.protocol:
            name = task_title(row.cell, row.protocol)
            tasks.setdefault(name, {}).setdefault((row.label, row.iterations), row)
    return {name: list(cells.values()) for name, cells in tasks.items()}
