"""Result tables of fault injection: printed, and saved as CSV, JSON and Markdown."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text


def print_row(row: Any) -> Any:
    """Print a row as soon as it is known; returns it."""
    print(" | ".join(_cells(row)), flush=True)
    return row


def print_table(part: str, rows: Sequence[Any], seconds: float) -> None:
    """Print the table of a part and how many of its rows passed."""
    console = Console(width=None if Console().is_terminal else 180)
    passed = sum(row.passed for row in rows)
    title = f"{part}: {passed} of {len(rows)} passed in {seconds:.0f} s"
    table = Table(*_header(rows), title=title)
    for row in rows:
        table.add_row(*map(Text, _cells(row)), style="" if row.passed else "red")
    console.print(table)


def save(folder: Path, part: str, rows: Sequence[Any]) -> None:
    """Write FOLDER/PART.csv, .json and .md."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{part}.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([_header(rows), *map(_cells, rows)])
    records = [{**row._asdict(), "passed": row.passed} for row in rows]
    (folder / f"{part}.json").write_text(json.dumps(records, indent=2), encoding="utf-8")
    lines = [_header(rows), ["---"] * len(_header(rows)), *map(_cells, rows)]
    (folder / f"{part}.md").write_text(
        "".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |\n" for line in lines),
        encoding="utf-8",
    )


def _header(rows: Sequence[Any]) -> list[str]:
    return [name.replace("_", " ") for name in (*rows[0]._fields, "passed")] if rows else []


def _cells(row: Any) -> list[str]:
    return [" ".join(str(cell).split()) for cell in (*row, "yes" if row.passed else "NO")]
