"""The cells of published tables: a preset each, with the published result."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf, open_dict

from metadist.config import compose as compose_overrides
from metadist.config.hydra_version import VERSION_BASE
from metadist.errors import UserError

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PUBLISHED = HERE / "published.yaml"


@dataclass(frozen=True)
class Cell:
    """A cell of a published table.

    Attributes:
        preset: its name in conf/experiment.
        dataset: the name of its dataset.
        metric: "accuracy" (0 to 1) or "mse".
        results: the published results by number of inner steps; the key None stands for the last
            step. None, or no entry, where nothing is published.
        interval: half the width of the published 95% interval; None if not published.
        source: paper and table.
        protocol: the known part of the published protocol, with the keys of results.json.
        remark: printed with the table; "" for none.
        recipe_of: the preset of the plain cell, for a recipe with other settings; "" for none.
        recipe: how the recipe differs from the plain cell.
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


def load_cells(path: Path = PUBLISHED) -> dict[str, Cell]:
    """All cells by preset, in the order of the file."""
    saved: Any = OmegaConf.to_container(OmegaConf.load(path))
    plain = {name: entry for name, entry in saved.items() if "recipe_of" not in entry}
    return {
        name: _cell(name, plain[entry["recipe_of"]] | entry if name not in plain else entry)
        for name, entry in saved.items()
    }


def _cell(name: str, entry: Mapping[str, Any]) -> Cell:
    results: dict[int | None, float | None] = {}
    if "accuracy" in entry:
        results = {None: round(entry["accuracy"] / 100, 6)}
    results |= entry.get("mse_by_steps", {})
    interval = entry.get("interval")
    return Cell(
        preset=name,
        dataset=entry["dataset"],
        metric="mse" if entry["dataset"] == "sinusoid" else "accuracy",
        results=results,
        interval=None if interval is None else round(interval / 100, 6),
        source=entry.get("source", ""),
        protocol=entry.get("protocol", {}),
        remark=entry.get("remark", ""),
        recipe_of=entry.get("recipe_of", ""),
        recipe=entry.get("recipe", ""),
    )


def select_cells(cells: Mapping[str, Cell], names: Sequence[str]) -> list[Cell]:
    """The cells of presets, datasets, or `all`.

    Raises:
        UserError: an unknown name.
    """
    selected: dict[str, Cell] = {}
    datasets = list(dict.fromkeys(cell.dataset for cell in cells.values()))
    for name in names:
        found = {p: cell for p, cell in cells.items() if name in (p, cell.dataset, "all")}
        if not found:
            near = difflib.get_close_matches(name, [*cells, *datasets], n=3)
            raise UserError(
                f"{name} is neither a preset of conf/experiment nor a dataset of one: "
                f"{'did you mean ' + ' or '.join(near) if near else 'see --list'}?"
            )
        selected |= found
    return list(selected.values())


def compose(overrides: Sequence[str]) -> DictConfig:
    """The configuration of `experiments/maml.py`; interpolations are not resolved."""
    with hydra.initialize_config_dir(str(ROOT / "conf"), **VERSION_BASE):
        configuration = compose_overrides("maml", overrides)
    with open_dict(configuration):
        configuration.pop("launcher", None)
    return configuration
