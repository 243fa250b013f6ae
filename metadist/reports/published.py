"""The cells of published tables: for each cell a preset and the published result."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from metadist.metrics import is_percentage, score, task_metric

_CELLS = Path(__file__).with_name("published.yaml")
_PRESETS = Path(__file__).parents[1] / "conf" / "experiment"

MIN_FRACTION = 0.5
"""Runs of less than this fraction of a preset's iterations are not reported as below the result."""

_ROUNDING = 1e-9
"""Tolerance for decimal representations."""


@dataclass(frozen=True)
class Cell:
    """A cell of a published table.

    Attributes:
        preset: the name of the preset in conf/experiment.
        dataset: the name of the dataset.
        metric: "accuracy" (0 to 1) or "mse".
        results: the published results by number of inner steps; the key None stands for the last
            step. A result that is not published is None or has no entry.
        interval: half the width of the published 95% interval; None if it is not published.
        source: the paper and the table.
        protocol: the known part of the published protocol, with the keys of results.json.
        remark: a remark that is printed with the table; "" for none.
        recipe_of: for a recipe with other settings, the preset of the plain cell; else "".
        recipe: a description of how the recipe differs from the plain cell.
    """

    preset: str
    dataset: str
    metric: str
    results: dict[int | None, float | None] = field(default_factory=dict)
    interval: float | None = None
    source: str = ""
    protocol: dict[str, Any] = field(default_factory=dict)
    remark: str = ""
    recipe_of: str = ""
    recipe: str = ""

    def steps(self) -> list[int | None]:
        """The numbers of inner steps with a result; None for the last step."""
        return list(self.results) or [None]


def load_cells() -> dict[str, Cell]:
    """All cells by preset, in the order of `published.yaml`."""
    saved = yaml.safe_load(_CELLS.read_text(encoding="utf-8"))
    plain = {name: entry for name, entry in saved.items() if "recipe_of" not in entry}
    return {
        name: _cell(name, plain[entry["recipe_of"]] | entry if name not in plain else entry)
        for name, entry in saved.items()
    }


def published_differences(cell: Cell, protocol: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The keys in which a run's protocol differs from the known part of the published one.

    results.json omits train_… keys with the same value as in the test, and options that are false.

    Args:
        cell: the published result.
        protocol: the protocol of the run; {} if the run has not been tested.

    Returns:
        (published, measured) for each key that differs.
    """
    differences = {}
    for key, published in cell.protocol.items():
        measured = protocol.get(key, protocol.get(key.removeprefix("train_")))
        if measured is None and published is True and protocol:
            measured = False
        if measured is not None and measured != published:
            differences[key] = published, measured
    return differences


def compare_values(
    cell: Cell, published: float, measured: float, fraction: float | None
) -> tuple[str, str]:
    """Compare a measured value with the published one.

    Args:
        cell: the cell of the published value.
        published: the published value.
        measured: the measured value.
        fraction: the iterations divided by the preset's iterations; None if these are unknown.

    Returns:
        "good" if the value is at least the lower end of the published interval; else "muted" if
        `fraction` is less than `MIN_FRACTION`, or "bad". And the comparison as text, "" if muted.
    """
    gap = score(published - measured, cell.metric)
    if not math.isfinite(gap):
        return "bad", "diverged"
    if gap <= (cell.interval or 0.0) + _ROUNDING:
        return "good", "reached"
    if fraction is not None and fraction < MIN_FRACTION:
        return "muted", ""
    percent = is_percentage(cell.metric)
    return "bad", f"{100 * gap:.2f} points below" if percent else f"{gap:.3f} above"


def preset_iterations(preset: str) -> int | None:
    """The training iterations of a preset in conf/experiment, or of the preset it is based on."""
    path = _PRESETS / f"{preset}.yaml"
    content = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else {}
    if iterations := content.get("trainer", {}).get("iterations"):
        return int(iterations)
    bases = [name for name in content.get("defaults", ()) if isinstance(name, str)]
    return next((preset_iterations(base) for base in bases if base != "_self_"), None)


def _cell(name: str, entry: Mapping[str, Any]) -> Cell:
    results: dict[int | None, float | None] = {}
    if "accuracy" in entry:
        results = {None: round(entry["accuracy"] / 100, 6)}
    results |= entry.get("mse_by_steps", {})
    interval = entry.get("interval")
    optional = ("source", "protocol", "remark", "recipe_of", "recipe")
    return Cell(
        preset=name,
        dataset=entry["dataset"],
        metric=task_metric(entry["dataset"] == "sinusoid"),
        results=results,
        interval=None if interval is None else round(interval / 100, 6),
        **{name: entry[name] for name in optional if name in entry},
    )
