"""A run's result beside the published one of its preset."""

from collections.abc import Mapping
from typing import Any

from metadist.metrics import format_metric, is_percentage, score
from metadist.reports.comparison import protocol_differences
from metadist.reports.published import MIN_FRACTION, Cell, load_cells, preset_iterations
from metadist.reports.run_record import RunRecord

_TASK_KEYS = {"dataset", "ways", "shots", "class_split", "within_alphabet"}
"""Keys of a protocol without which a result is of another task."""


def compare_with_published(record: RunRecord) -> dict[str, Any] | None:
    """The result beside the published one of the run's preset; None without one.

    Returns:
        `kind` ("good", "bad" or "muted"), `sentence`, and `notes` on what differs. A run of less
        than `MIN_FRACTION` of the preset's iterations is not said to be below the published one;
        one of other ways, shots or classes is not compared.
    """
    cell = load_cells().get(record.preset)
    if cell is None or not any(value is not None for value in cell.results.values()):
        return None
    differences = _protocol_differences(record, cell)
    other_task = bool(differences.keys() & _TASK_KEYS)
    kinds, parts = _compare_values(record, cell, other_task)
    notes = [
        f"{key.replace('_', ' ')}: {each['this run']} here, {each['published']} in the paper."
        for key, each in differences.items()
    ]
    if other_task:
        notes.append("Not compared: another task than the published one.")
    if "muted" in kinds:
        done, length = record.iterations[0], preset_iterations(record.preset)
        notes.append(f"Not compared: {done:,} of the preset's {length:,} iterations.")
    notes += [f"Recipe: {cell.recipe}."] if cell.recipe else []
    notes += [f"Remark: {cell.remark}."] if cell.remark else []
    settings = [o for o in record.overrides if not o.lstrip("+").startswith("experiment=")]
    notes += [f"Overrides beyond the preset: {' '.join(settings)}"] if settings else []
    return {
        "kind": next((kind for kind in ("bad", "muted", "good") if kind in kinds), "muted"),
        "sentence": f"Published ({cell.source}): {'; '.join(parts)}.",
        "notes": notes,
    }


def _protocol_differences(record: RunRecord, cell: Cell) -> dict[str, dict[str, Any]]:
    """What differs from the known part of the published protocol."""
    protocol = (record.results or {}).get("protocol", {})
    # results.json omits train_… keys that are equal to the test's.
    own = {f"train_{key}": value for key, value in protocol.items()} | protocol
    known = {key: value for key, value in cell.protocol.items() if key in own}
    return protocol_differences({"published": known, "this run": own}, own.keys() - known)


def _compare_values(record: RunRecord, cell: Cell, other_task: bool) -> tuple[set[str], list[str]]:
    """How each published value compares ("good", "bad", or "muted" for a short run), and a text for
    each.
    """
    metric = record.metric
    measured = _measured(record.results or {}, metric)
    length = preset_iterations(record.preset)
    short = length is not None and record.iterations[0] < MIN_FRACTION * length
    kinds, parts = set(), []
    for steps, value in cell.results.items():
        if value is None:
            continue
        after = "" if steps is None else f" after {steps} step{'s' if steps > 1 else ''}"
        interval = "" if cell.interval is None else f" ± {format_metric(cell.interval, metric)}"
        part = f"{format_metric(value, metric)}{interval}{after}"
        here = f" ({format_metric(measured[steps], metric)} here)" if steps in measured else ""
        if here and not other_task:
            gap = score(value - measured[steps], metric)
            if gap <= (cell.interval or 0.0) + 1e-9:
                kinds.add("good")
                part += ", reached"
            elif short:
                kinds.add("muted")
            else:
                kinds.add("bad")
                part += f", {_gap(gap, metric)}"
        if other_task or steps is not None:
            part += here
        parts.append(part)
    return kinds, parts


def _measured(results: Mapping[str, Any], metric: str) -> dict[int | None, float]:
    """The test metric by number of inner steps; None is the last step."""
    if f"test_{metric}" not in results:
        return {}
    rows = results.get(f"test_{metric}_by_steps") or ()
    by_steps: dict[int | None, float] = {int(row["steps"]): float(row["mean"]) for row in rows}
    return {None: float(results[f"test_{metric}"]), **by_steps}


def _gap(gap: float, metric: str) -> str:
    return f"{100 * gap:.2f} points below" if is_percentage(metric) else f"{gap:.3g} above"
