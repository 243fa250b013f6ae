"""The table: in Markdown for people, in CSV for programs."""

import csv
import io
import json
from collections.abc import Sequence

from reproduction.gather import Row, beside

from metadist.reports import format_differences

_NAMED = (
    ("ways", "{}-way"),
    ("shots", "{}-shot"),
    ("queries", "{} queries"),
    ("train_ways", "{} ways in training"),
    ("train_shots", "{} shots in training"),
    ("train_queries", "{} queries in training"),
)
"""How the protocol's first keys are told; the others after them, one by one."""


def markdown(rows: Sequence[Row], command: str) -> str:
    """The whole document.

    Args:
        rows: of the table.
        command: that makes it.
    """
    lines = ["# Reproduction", "", f"Made by `{command}`.", ""]
    head = ("cell", "paper", "ours", "seeds", "iterations", "time a run", "outcome")
    lines += [_line(head), _line(["---"] * len(head))]
    lines += [_line(_cells(row)) for row in rows]
    lines += [
        "",
        "Ours: the mean over seeds, ± half the width of the 95% interval over test tasks (mean of "
        "the seeds'), and in brackets the lowest and highest seed. Reached: at least the lower end "
        "of the paper's own interval, or its figure where it gives none. Iterations: of those of "
        "the preset.",
        "",
    ]
    if any(row.protocol for row in rows):
        lines += ["## Protocols", ""]
    first = {(row.label, row.iterations): row for row in reversed(rows)}
    for row in reversed(first.values()):
        lines += _protocol(row)
    columns = beside(rows)
    if columns:
        lines += ["## Not alike", "", "Cells beside each other that differ in their protocol:", ""]
        for name, differences in columns.items():
            lines += [f"- {name}: {'; '.join(format_differences(differences))}"]
        lines += [""]
    for title, kind in (("Failures", "failures"), ("Unfinished", "unfinished")):
        told_of = {
            (row.label, row.iterations, seed): words
            for row in rows
            for seed, words in getattr(row, kind).items()
        }
        if told_of:
            lines += [f"## {title}", ""]
            for (label, iterations, seed), words in told_of.items():
                lines += [f"- {label}, seed {seed}, {iterations} iterations: {words}"]
            lines += [""]
    return "\n".join(lines).rstrip() + "\n"


_COLUMNS = (
    "cell",
    "options",
    "metric",
    "steps",
    "paper",
    "paper_interval",
    "source",
    "ours",
    "ci95",
    "lowest",
    "highest",
    "seeds",
    "failed",
    "unfinished",
    "iterations",
    "published_iterations",
    "seconds",
    "world",
    "outcome",
    "method",
    "protocol",
    "differs_from_paper",
)


def csv_text(rows: Sequence[Row]) -> str:
    """The same for programs: a line a row, accuracies from 0 to 1, seconds, protocols as JSON."""
    text = io.StringIO()
    writer = csv.DictWriter(text, _COLUMNS, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        known = {name: getattr(row, name) for name in _COLUMNS if hasattr(row, name)}
        writer.writerow(
            {
                **known,
                "cell": row.cell.preset,
                "options": " ".join(row.options),
                "metric": row.cell.metric,
                "paper_interval": row.cell.interval,
                "source": row.cell.source,
                "seeds": " ".join(map(str, row.seeds)),
                "failed": " ".join(map(str, row.failures)),
                "unfinished": " ".join(map(str, row.unfinished)),
                "method": json.dumps(row.method),
                "protocol": json.dumps(row.protocol),
                "differs_from_paper": json.dumps(row.differs),
            }
        )
    return text.getvalue()


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _cells(row: Row) -> list[str]:
    of = row.published_iterations
    share = "" if of in (None, row.iterations) else f" of {of:,}"
    return [
        row.name,
        _paper(row),
        _ours(row),
        str(len(row.seeds)),
        f"{row.iterations:,}{share}",
        "" if row.seconds is None else f"{_time(row.seconds)}, {row.world}",
        row.outcome,
    ]


def _paper(row: Row) -> str:
    if row.paper is None:
        return "—"
    spread = "" if row.cell.interval is None else f" ± {_number(row, row.cell.interval)}"
    return _number(row, row.paper) + spread + _unit(row)


def _ours(row: Row) -> str:
    if row.ours is None or row.ci95 is None or row.lowest is None or row.highest is None:
        return "—"
    told_range = ""
    if len(row.seeds) > 1:
        told_range = f" ({_number(row, row.lowest)} to {_number(row, row.highest)})"
    return f"{_number(row, row.ours)} ± {_number(row, row.ci95)}{_unit(row)}{told_range}"


def _number(row: Row, value: float) -> str:
    return f"{value:.3f}" if row.cell.metric == "mse" else f"{100 * value:.2f}"


def _unit(row: Row) -> str:
    return "" if row.cell.metric == "mse" else "%"


def _time(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}"


def _protocol(row: Row) -> list[str]:
    if not row.protocol:
        return []
    named = [
        text.format(row.protocol[key])
        for key, text in _NAMED
        if key in row.protocol and not (key == "ways" and row.cell.metric == "mse")
    ]
    others = [
        f"{key.replace('_', ' ')}: {_value(value)}"
        for key, value in {**row.method, **row.protocol}.items()
        if key not in dict(_NAMED)
    ]
    lines = [f"- **{row.label}**: {', '.join([*named, *others])}."]
    if row.cell.source:
        lines += [f"  - Paper: {row.cell.source}."]
    if row.cell.remark:
        lines += [f"  - {row.cell.remark[0].upper()}{row.cell.remark[1:]}."]
    for key, (theirs, mine) in row.differs.items():
        lines += [f"  - Differs from the paper in {key}: {theirs} there, {mine} here."]
    for sentence in format_differences(row.uneven):
        lines += [f"  - The seeds are not alike: {sentence}."]
    return [*lines, ""]


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{_value(each)} {key}" for key, each in value.items())
    return str(value)
