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
    own = os.environ.get(PRETRAINED_VARIABLE)
    directories = [PRETRAINED_DIRECTORY, *([Path(own).expanduser()] if own else [])]
    found = {path.stem: path for each in directories for path in each.glob(f"*{WEIGHTS_SUFFIX}")}
    return dict(sorted(found.items()))


def find_weights(path: str | Path) -> Path:
    """The path of a run, checkpoint or weights file, or of pretrained weights by their name.

    Args:
        path: an existing path, or a name. An existing path takes precedence.

    Raises:
        UserError: it is neither.
    """
    given = Path(path).expanduser()
    if given.exists():
        return given
    found = pretrained_weights()
    if str(given) in found:
        return found[str(given)]
    names = f"the pretrained names are {', '.join(found)}" if found else "no weights are installed"
    raise UserError(
        f"{path} is neither a path nor the name of pretrained weights"
        f"{did_you_mean(given.name, found)}: give a run's directory, a checkpoint or a weights "
        f"file; {names}."
    )
