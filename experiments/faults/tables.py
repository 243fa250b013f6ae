"""Tables of what was found: shown, and saved as CSV, JSON and Markdown."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text


def tell(row: Any) -> Any:
    """Print a row as soon as it is known; returns it."""
    print(" | ".join(_cells(row)), flush=True)
    return row


def show(part: str, rows: Sequence[Any], seconds: float) -> None:
    """Print a part's table and how many of its rows are good."""
    console = Console(width=None if Console().is_terminal else 180)
    good = sum(row.good for row in rows)
    title = f"{part}: {good} of {len(rows)} as they should be, in {seconds:.0f} s"
    table = Table(*_header(rows), title=title)
    for row in rows:
        table.add_row(*map(Text, _cells(row)), style="" if row.good else "red")
    console.print(table)


def save(folder: Path, part: str, rows: Sequence[Any]) -> None:
    """Write FOLDER/PART.csv, .json and .md."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{part}.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([_header(rows), *map(_cells, rows)])
    records = [{**row._asdict(), "good": row.good} for row in rows]
    (folder / f"{part}.json").write_text(json.dumps(records, indent=2), encoding="utf-8")
    lines = [_header(rows), ["---"] * len(_header(rows)), *map(_cells, rows)]
    (folder / f"{part}.md").write_text(
        "".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |\n" for line in lines),
        encoding="utf-8",
    )


def _header(rows: Sequence[Any]) -> list[str]:
    return [name.replace("_", " ") for name in (*rows[0]._fields, "good")] if rows else []


def _cells(row: Any) -> list[str]:
    return [" ".join(str(cell).split()) for cell in (*row, "yes" if row.good else "NO")]
