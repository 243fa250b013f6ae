"""Select cells of published tables, and compose their presets."""

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path

import hydra
from omegaconf import DictConfig, open_dict

from metadist.config.overrides import VERSION_BASE
from metadist.config.overrides import compose as compose_overrides
from metadist.errors import UserError
from metadist.reports.published import Cell, load_cells

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent

__all__ = ["HERE", "ROOT", "Cell", "compose", "load_cells", "select_cells"]


def select_cells(cells: Mapping[str, Cell], names: Sequence[str]) -> list[Cell]:
    """The cells of presets, datasets, or `all`.

    Raises:
        UserError: a name is unknown.
    """
    selected: dict[str, Cell] = {}
    datasets = list(dict.fromkeys(cell.dataset for cell in cells.values()))
    for name in names:
        matches = {p: cell for p, cell in cells.items() if name in (p, cell.dataset, "all")}
        if not matches:
            near = difflib.get_close_matches(name, [*cells, *datasets], n=3)
            raise UserError(
                f"{name} is neither a preset of conf/experiment nor a dataset of one: "
                f"{'did you mean ' + ' or '.join(near) if near else 'see --list'}?"
            )
        selected |= matches
    return list(selected.values())


def compose(overrides: Sequence[str]) -> DictConfig:
    """The configuration of `experiments/maml.py`; interpolations are not resolved."""
    with hydra.initialize_config_dir(str(ROOT / "conf"), **VERSION_BASE):
        configuration = compose_overrides("maml", overrides)
    with open_dict(configuration):
        configuration.pop("launcher", None)
    return configuration
