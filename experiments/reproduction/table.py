"""The table as Markdown and CSV."""

import csv
import io
import json
import math
from collections import Counter
from collections.abc import Sequence

from reproduction.rows import Row, rows_by_task

from metadist.metrics import score
from metadist.reports import format_differences
from metadist.reports.published import MIN_FRACTION, preset_iterations


def markdown(rows: Sequence[Row], command: str, without_run: Sequence[str] = ()) -> str:
    """The document in Markdown.

    Args:
        rows: see `aggregate`.
        command: the command that creates it.
        without_run: the presets to list as without a finished run.
    """
    lines = ["# Reproduction", "", f"Created by `{command}`.", ""]
    head = ("preset", "published", "measured", "seeds", "iterations", "cost of a run", "outcome")
    lines += [_line(head), _line(["---"] * len(head))]
    lines += [_line(_cells(row)) for row in rows]
    lines += [
        "",
        "Measured: mean over seeds ± half the width of the 95% interval over test tasks (mean over "
        "seeds), with the lowest and highest seed in brackets. The interval excludes the variance "
        "over seeds. Reached: at least the lower end of the published interval, or the published "
        "value without one. Inside the intervals: the published and the measured interval overlap. "
        "Not compared: below the published value after less than "
        f"{100 * MIN_FRACTION:.0f}% of the preset's iterations. Cost: wall time × workers.",
        "",
    ]
    tasks = rows_by_task(rows)
    if tasks:
        lines += ["## Protocols", ""]
    for task, cells in tasks.items():
        lines += _protocols(task, cells)
    for title, kind in (("Failures", "failures"), ("Unfinished", "unfinished")):
        messages = {
            (row.label, row.iterations, seed): message
            for row in rows
            for seed, message in getattr(row, kind).items()
        }
        if messages:
            lines += [f"## {title}", ""]
            for (label, iterations, seed), message in messages.items():
                lines += [f"- {label}, seed {seed}, {iterations} iterations: {message}"]
            lines += [""]
    if without_run:
        lines += ["## No finished run", "", ", ".join(without_run) + ".", ""]
    return "\n".join(lines).rstrip() + "\n"


def summary(rows: Sequence[Row]) -> str:
    """The presets with a published result as a short Markdown table, without costs and protocols.

    Of the recipes for a preset, the one with the best test result is shown. Each preset has one
    line; results by number of inner steps are separated by commas. The iterations of a recipe are
    shown with those of its plain preset.

    Args:
        rows: see `aggregate`.
    """
    lines = [_line(("preset", "published", "measured", "seeds", "iterations")), _line(["---"] * 5)]
    cells: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        if row.published is not None:
            cells.setdefault((row.label, row.iterations), []).append(row)
    best: dict[str, Row] = {}
    for row, *_ in cells.values():
        preset = row.cell.recipe_of
        if preset and (preset not in best or _score(row) > _score(best[preset])):
            best[preset] = row
    for (label, iterations), group in cells.items():
        row = group[0]
        metric = "MSE" if row.cell.metric == "mse" else row.cell.metric
        steps = ", ".join(str(member.steps) for member in group if member.steps is not None)
        recipe_of = row.cell.recipe_of
        if recipe_of and row is not best[recipe_of]:
            continue
        total = preset_iterations(recipe_of) if recipe_of else row.published_iterations
        lines += [
            _line(
                (
                    f"`{label}`, {metric}" + (f" after {steps} inner steps" if steps else ""),
                    ", ".join(dict.fromkeys(map(_published, group))),
                    ", ".join(_measured(member, seeds=False) for member in group),
                    str(len(row.seeds)),
                    f"{iterations:,}" + (f" of {total:,}" if total and iterations < total else ""),
                )
            )
        ]
    return "\n".join(lines) + "\n"


def _score(row: Row) -> float:
    return -math.inf if row.measured is None else score(row.measured, row.cell.metric)


_COLUMNS = (
    "cell",
    "options",
    "metric",
    "steps",
    "published",
    "published_interval",
    "source",
    "measured",
    "ci95",
    "lowest",
    "highest",
    "seeds",
    "failed",
    "unfinished",
    "iterations",
    "published_iterations",
    "seconds",
    "core_hours",
    "world",
    "outcome",
    "method",
    "protocol",
    "differences",
)


def csv_text(rows: Sequence[Row]) -> str:
    """The table as CSV: accuracies from 0 to 1, times in seconds, protocols as JSON."""
    text = io.StringIO()
    writer = csv.DictWriter(text, _COLUMNS, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        values = {name: getattr(row, name) for name in _COLUMNS if hasattr(row, name)}
        writer.writerow(
            {
                **values,
                "cell": row.cell.preset,
                "options": " ".join(row.options),
                "metric": row.cell.metric,
                "published_interval": row.cell.interval,
                "source": row.cell.source,
                "seeds": " ".join(map(str, row.seeds)),
                "failed": " ".join(map(str, row.failures)),
                "unfinished": " ".join(map(str, row.unfinished)),
                "method": json.dumps(row.method),
                "protocol": json.dumps(row.protocol),
                "differences": json.dumps(row.differences),
            }
        )
    return text.getvalue()


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _cells(row: Row) -> list[str]:
    total = row.published_iterations
    length = "" if total in (None, row.iterations) else f" of {total:,}"
    recipe = f" (recipe: {row.cell.recipe})" if row.cell.recipe_of else ""
    return [
        row.name + recipe,
        _published(row),
        _measured(row),
        str(len(row.seeds)),
        f"{row.iterations:,}{length}",
        "" if row.core_hours is None else f"{row.core_hours:.2f} core-hours, {row.world}",
        row.outcome,
    ]


def _published(row: Row) -> str:
    if row.published is None:
        return "—"
    spread = "" if row.cell.interval is None else f" ± {_number(row, row.cell.interval)}"
    return _number(row, row.published) + spread + _unit(row)


def _measured(row: Row, seeds: bool = True) -> str:
    if row.measured is None or row.ci95 is None or row.lowest is None or row.highest is None:
        return "—"
    spread = ""
    if seeds and len(row.seeds) > 1:
        spread = f" ({_number(row, row.lowest)} to {_number(row, row.highest)})"
    if not math.isfinite(row.measured):
        return f"diverged{spread}"
    interval = f" ± {_number(row, row.ci95)}" if math.isfinite(row.ci95) else ""  # of one task
    return f"{_number(row, row.measured)}{interval}{_unit(row)}{spread}"


def _number(row: Row, value: float) -> str:
    return f"{value:.3f}" if row.cell.metric == "mse" else f"{100 * value:.2f}"


def _unit(row: Row) -> str:
    return "" if row.cell.metric == "mse" else "%"


def _protocols(task: str, rows: Sequence[Row]) -> list[str]:
    protocols = [row.protocol or {} for row in rows]
    keys = dict.fromkeys(key for protocol in protocols for key in protocol)
    usual = {
        key: Counter(_value(protocol.get(key)) for protocol in protocols).most_common(1)[0][0]
        for key in keys
    }
    shown = [f"{_key_label(key)}: {value}" for key, value in usual.items() if value != _value(None)]
    lines = [f"### {task}", "", f"Unless a preset states another: {'; '.join(shown)}.", ""]
    for row, protocol in zip(rows, protocols, strict=True):
        values = {key: _value(protocol.get(key)) for key in keys}
        lines += _cell_protocol(
            row, [f"{_key_label(key)}: {values[key]}" for key in keys if values[key] != usual[key]]
        )
    return [*lines, ""]


def _cell_protocol(row: Row, differing: Sequence[str]) -> list[str]:
    options = [f"{key}={_value(value)}" for key, value in row.method.get("options", {}).items()]
    method = " with ".join([row.method["algorithm"], *([", ".join(options)] if options else [])])
    lines = ["; ".join([f"- `{row.label}`: {method}", *differing]) + "."]
    if row.cell.recipe_of:
        lines += [f"  - Recipe for {row.cell.recipe_of}: {row.cell.recipe}."]
    if row.cell.source:
        lines += [f"  - Source: {row.cell.source}."]
    if row.cell.remark:
        lines += [f"  - {row.cell.remark[0].upper()}{row.cell.remark[1:]}."]
    for key, (published, measured) in row.differences.items():
        lines += [f"  - Different protocol: {key} is {published} in the paper, {measured} here."]
    for sentence in format_differences(row.seed_differences):
        lines += [f"  - The seeds differ: {sentence}."]
    return lines


def _key_label(key: str) -> str:
    return key.replace("_", " ")


def _value(value: object) -> str:
    if value is None:
        return "—"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{_value(item)} {key}" for key, item in value.items())
    return str(value)
