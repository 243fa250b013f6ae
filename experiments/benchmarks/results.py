"""Results of a benchmark: data as JSON, and tables in Markdown, which the console shows too."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.programs import machine
from rich.console import Console
from rich.markdown import Markdown

console = Console(highlight=False, width=None if Console().is_terminal else 160)
"""The console of the benchmarks."""


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown with its title above."""
    lines = [columns, ["---"] * len(columns), *rows]
    cells = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return "\n".join([f"{title}\n", *(f"| {' | '.join(line)} |" for line in cells)])


def save(file: Path, data: Mapping[str, Any], parts: Sequence[str], show: bool = False) -> None:
    """Write the results so far into FILE.json and FILE.md.

    Args:
        file: the path of the files without suffix.
        data: the content of FILE.json, to which the machine is added if it has none.
        parts: the paragraphs and tables of FILE.md.
        show: whether to print them too, at the end of the benchmark.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    content = json.dumps({"machine": machine(), **data}, indent=1)
    Path(f"{file}.json").write_text(content, encoding="utf-8")
    text = "\n\n".join(parts) + "\n"
    Path(f"{file}.md").write_text(text, encoding="utf-8")
    if show:
        console.print(Markdown(text))
        console.print(f"saved: {file}.json, {file}.md")
