"""Comparison of a run's result with the published result of its preset."""

from collections.abc import Mapping
from typing import Any

from metadist.metrics import counted, format_estimate, format_metric
from metadist.reports.published import (
    Cell,
    compare_values,
    load_cells,
    preset_iterations,
    published_differences,
)
from metadist.reports.run_record import RunRecord

_TASK_KEYS = {"dataset", "ways", "shots", "class_split", "within_alphabet", "test_drawers"}
"""Results are of different tasks if their protocols differ in one of these keys."""


def compare_with_published(record: RunRecord) -> dict[str, Any] | None:
    """Compare the result of a run with the published result of its preset.

    Returns:
        `kind` ("good", "bad" or "muted"), `sentence`, and `notes` on differences; None without a
        published result. A run of less than `MIN_FRACTION` of the preset's iterations is not
        reported as below the published result; a run with other ways, shots or classes is not
        compared.
    """
    cell = load_cells().get(record.preset)
    if cell is None or not any(value is not None for value in cell.results.values()):
        return None
    differences = published_differences(cell, (record.results or {}).get("protocol", {}))
    other_task = bool(differences.keys() & _TASK_KEYS)
    kinds, parts = _compare_values(record, cell, other_task)
    notes = [
        f"{key.replace('_', ' ')}: {measured} here, {published} in the paper."
        for key, (published, measured) in differences.items()
    ]
    if other_task:
        notes.append("Not compared: another task than the published one.")
    if "muted" in kinds:
        done, length = record.iterations[0], preset_iterations(record.preset)
        notes.append(f"Not compared: {done:,} of the preset's {length:,} iterations.")
    notes += [f"Recipe: {cell.recipe}."] if cell.recipe else []
    notes += [f"Remark: {cell.remark}."] if cell.remark else []
    settings = [arg for arg in record.overrides if not arg.lstrip("+").startswith("experiment=")]
    notes += [f"Overrides beyond the preset: {' '.join(settings)}"] if settings else []
    return {
        "kind": next((kind for kind in ("bad", "muted", "good") if kind in kinds), "muted"),
        "sentence": f"Published ({cell.source}): {'; '.join(parts)}.",
        "notes": notes,
    }


def _compare_values(record: RunRecord, cell: Cell, other_task: bool) -> tuple[set[str], list[str]]:
    """Compare each published value: "good", "bad" or, for a short run, "muted"; and its text."""
    metric = record.metric
    measured = _measured(record.results or {}, metric)
    length = preset_iterations(record.preset)
    fraction = record.iterations[0] / length if length else None
    kinds, parts = set(), []
    for steps, value in cell.results.items():
        if value is None:
            continue
        after = "" if steps is None else f" after {counted(steps, 'step')}"
        part = format_estimate(value, cell.interval, metric) + after
        result = f" ({format_metric(measured[steps], metric)} here)" if steps in measured else ""
        if result and not other_task:
            kind, text = compare_values(cell, value, measured[steps], fraction)
            kinds.add(kind)
            part += f", {text}" if text else ""
        if other_task or steps is not None:
            part += result
        parts.append(part)
    return kinds, parts


def _measured(results: Mapping[str, Any], metric: str) -> dict[int | None, float]:
    """The test metric by number of inner steps; None is the last step."""
    if f"test_{metric}" not in results:
        return {}
    rows = results.get(f"test_{metric}_by_steps") or ()
    by_steps: dict[int | None, float] = {int(row["steps"]): float(row["mean"]) for row in rows}
    return {None: float(results[f"test_{metric}"]), **by_steps}
