"""The cells of the papers' tables: a preset each, with the figure that the paper has for it."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hydra
from omegaconf import OmegaConf

from metadist.errors import UserError

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PUBLISHED = HERE / "published.yaml"


@dataclass(frozen=True)
class Cell:
    """One cell.

    Attributes:
        preset: its name in conf/experiment.
        dataset: its dataset's name.
        metric: "accuracy" (0 to 1) or "mse".
        figures: the paper's figures; by number of inner steps for "mse", under None (after the
            last step) for "accuracy". None, or no entry, where nothing is published.
        interval: half the width of the paper's 95% interval, None where it gives none.
        source: paper and table.
        protocol: what is known of the paper's protocol, as in results.json.
        remark: for people, "" for none.
    """

    preset: str
    dataset: str
    metric: str
    figures: dict[int | None, float | None] = field(default_factory=dict)
    interval: float | None = None
    source: str = ""
    protocol: dict[str, Any] = field(default_factory=dict)
    remark: str = ""

    def rows(self) -> list[int | None]:
        """The numbers of inner steps after which the cell has a figure; None is after the last."""
        return list(self.figures) or [None]


def load_cells(path: Path = PUBLISHED) -> dict[str, Cell]:
    """All cells by preset, in the order of the file."""
    held: Any = OmegaConf.to_container(OmegaConf.load(path))
    return {name: _cell(name, about) for name, about in held.items()}


def _cell(name: str, about: Mapping[str, Any]) -> Cell:
    figures: dict[int | None, float | None] = {}
    if "accuracy" in about:
        figures = {None: round(about["accuracy"] / 100, 6)}
    figures |= about.get("mse_by_steps", {})
    interval = about.get("interval")
    return Cell(
        preset=name,
        dataset=about["dataset"],
        metric="mse" if about["dataset"] == "sinusoid" else "accuracy",
        figures=figures,
        interval=None if interval is None else round(interval / 100, 6),
        source=about.get("source", ""),
        protocol=about.get("protocol", {}),
        remark=about.get("remark", ""),
    )


def choose(cells: Mapping[str, Cell], names: Sequence[str]) -> list[Cell]:
    """The cells of some names: presets, datasets, or `all`.

    Raises:
        UserError: a name is none of them.
    """
    chosen: dict[str, Cell] = {}
    datasets = list(dict.fromkeys(cell.dataset for cell in cells.values()))
    for name in names:
        found = {p: cell for p, cell in cells.items() if name in (p, cell.dataset, "all")}
        if not found:
            near = difflib.get_close_matches(name, [*cells, *datasets], n=3)
            raise UserError(
                f"{name} is no preset of conf/experiment and no dataset of one: "
                f"{'did you mean ' + ' or '.join(near) if near else 'see --list'}?"
            )
        chosen |= found
    return list(chosen.values())


def compose(words: Sequence[str]) -> dict[str, Any]:
    """The configuration of `experiments/maml.py` with some overrides, interpolations as written."""
    with hydra.initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        composed: Any = OmegaConf.to_container(hydra.compose("maml", list(words)))
    return composed
