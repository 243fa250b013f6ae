"""Records of finished runs: results and thinned metrics, by cell, length and seed."""

import json
from collections.abc import Mapping
from pathlib import Path

from reproduction.cells import HERE, ROOT, Cell
from reproduction.rows import Run, sort_runs
from reproduction.runs import configuration_differences

from metadist.errors import UserError
from metadist.files import wrap_write_errors
from metadist.loggers import METRICS_FILE, json_value, read_metrics
from metadist.metrics import result_metric
from metadist.reports import RESULTS_FILE, read_json, read_results, write_results
from metadist.reports.run_record import RunRecord

RECORDS = HERE / "records"
README = ROOT / "README.md"
TABLE = ROOT / "docs" / "reproduction_table.md"
_NOT_RECORDED = ("host", "directory")
_MAX_LINES = 200
"""The most training iterations in a record's `metrics.jsonl`, which has all validations."""


def add_record(
    cell: Cell, run: Path, records: Path = RECORDS, evaluation: Path | None = None
) -> Path:
    """Copy the results and the thinned metrics of a finished run into the records.

    The names of the host and the directory are omitted.

    Args:
        cell: the cell of the run.
        run: the run's directory.
        records: the directory of the records.
        evaluation: a file of `metadist evaluate` whose test replaces the run's own, such as that of
            an ensemble.

    Returns:
        The record's directory, `records/CELL/ITERATIONS/seedN`.

    Raises:
        UserError: the run has not finished, its settings differ from the cell's preset, or the
            evaluation is of another run.
    """
    results = read_results(run)
    if results is None:
        raise UserError(f"{run} has no {RESULTS_FILE}: record runs that have finished.")
    if evaluation is not None:
        tested = read_json(evaluation) or {}
        own = {
            "protocol": tested.get("trained_protocol"),
            "method": tested.get("trained_method", results.get("method")),
            "seed": tested.get("seed"),
        }
        complete = tested.keys() >= {"ci95", "protocol", f"test_{result_metric(results)}"}
        if not complete or any(results.get(name) != value for name, value in own.items()):
            raise UserError(f"{evaluation} is no result of metadist evaluate on {run}.")
        # The metrics after single inner steps are of the run's own test alone.
        kept = {name: value for name, value in results.items() if not name.startswith("test_")}
        names = ("ci95", "protocol", *(name for name in tested if name.startswith("test_")))
        # An evaluation has no callbacks: those of the training are kept.
        method = {**results.get("method", {}), **tested.get("method", {})}
        results = {**kept, **{name: tested[name] for name in names}, "method": method}
    preset = [f"+experiment={cell.preset}"]
    for key, (old, new) in configuration_differences(run, preset).items():
        raise UserError(
            f"{run} is no run of {cell.preset}: it has {key}={old}, the preset {key}={new}."
        )
    record = records / cell.preset / str(results["iterations"]) / f"seed{results['seed']}"
    with wrap_write_errors(record):
        record.mkdir(parents=True, exist_ok=True)
        environment = results.get("environment", {})
        kept = {name: environment[name] for name in environment if name not in _NOT_RECORDED}
        write_results(record, {**results, "environment": kept})
        lines = _thin(read_metrics(run / METRICS_FILE))
        text = "".join(json.dumps(json_value(line)) + "\n" for line in lines)
        (record / METRICS_FILE).write_text(text, encoding="utf-8")
    return record


def _thin(lines: list[dict]) -> list[dict]:
    """All validations, and evenly spaced training iterations including the last one."""
    training = [line for line in lines if "train_loss" in line]
    step = -(-len(training) // _MAX_LINES) if training else 1
    kept = {id(line) for line in training[::-1][::step]}
    return [line for line in lines if "train_loss" not in line or id(line) in kept]


def read_records(cells: Mapping[str, Cell], records: Path = RECORDS) -> list[Run]:
    """The recorded runs, in the order of the cells.

    Raises:
        UserError: the results of a record cannot be read, or belong to no cell.
    """
    runs = []
    for file in records.rglob(RESULTS_FILE):
        record = RunRecord(file.parent)
        name = file.relative_to(records).parts[0]
        if name not in cells:
            raise UserError(f"{file} is of no cell of published.yaml: rename or remove {name}.")
        seed, iterations = record.results["seed"], record.results["iterations"]
        runs.append(Run(record, cells[name], seed, iterations, ()))
    return sort_runs(runs, cells)
