"""Names of pretrained weights."""

import os
from pathlib import Path

from metadist.errors import UserError, did_you_mean
from metadist.training.weights_file import WEIGHTS_SUFFIX

PRETRAINED_DIRECTORY = Path(__file__).resolve().parents[1] / "pretrained"
"""The weights that are installed with metadist."""

PRETRAINED_VARIABLE = "METADIST_PRETRAINED"
"""Environment variable: a directory whose files `NAME.safetensors` precede the installed ones."""


def pretrained_weights() -> dict[str, Path]:
    """The weights files of the installed package and of `$METADIST_PRETRAINED`, by name, sorted."""
    variable = os.environ.get(PRETRAINED_VARIABLE)
    folders = [PRETRAINED_DIRECTORY, *([Path(variable).expanduser()] if variable else [])]
    files = {path.stem: path for folder in folders for path in folder.glob(f"*{WEIGHTS_SUFFIX}")}
    return dict(sorted(files.items()))


def find_weights(path: str | Path) -> Path:
    """The path of a run, checkpoint or weights file, or of pretrained weights by their name.

    Args:
        path: an existing path, or a name. An existing path takes precedence.

    Raises:
        UserError: it is neither.
    """
    expanded = Path(path).expanduser()
    if expanded.exists():
        return expanded
    files = pretrained_weights()
    if str(expanded) in files:
        return files[str(expanded)]
    names = f"the pretrained names are {', '.join(files)}" if files else "no weights are installed"
    raise UserError(
        f"{path} is neither a path nor the name of pretrained weights"
        f"{did_you_mean(expanded.name, files)}: give a run's directory, a checkpoint or a weights "
        f"file; {names}."
    )
