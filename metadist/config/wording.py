"""One sentence for what Hydra and the operating system say in several lines."""

import re

from hydra.errors import (
    ConfigCompositionException,
    InstantiationException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

_OF_AN_EXTRA = ("optuna", "joblib", "submitit")
"""What Hydra's sweepers and launchers that the extra `sweeps` brings are called."""


def explain(error: BaseException) -> str:
    """What was wrong, what was expected and what to do, in one line.

    Args:
        error: an error of Hydra, OmegaConf, the operating system, or one of metadist's own,
            whose text is taken as it is.
    """
    text = " ".join(str(error).split())
    if isinstance(error, MissingConfigException) and error.options:
        group, _, option = str(error.missing_cfg_file or "").rpartition("/")
        options = ", ".join(sorted(error.options))
        if group in ("hydra/launcher", "hydra/sweeper") and option.startswith(_OF_AN_EXTRA):
            return f"{group}={option} is not installed: pip install -e '.[sweeps]'."
        return f"{group}={option} is no option of {group}: choose one of {options}."
    if isinstance(error, OverrideParseException):
        return f"the override {error.override!r} cannot be read: write KEY=VALUE, as in seed=1."
    if isinstance(error, ConfigCompositionException):
        return _composition(text)
    if isinstance(error, MissingMandatoryValue):
        return f"{text.split(' full_key')[0]}: give it a value on the command line."
    if isinstance(error, InstantiationException | OmegaConfBaseException):
        return text
    if isinstance(error, OSError):
        where = f" ({error.filename})" if error.filename else ""
        return (
            f"{error.strerror or text}{where}: choose another directory, as in hydra.run.dir=DIR, "
            "or make this one writable."
        )
    if raised_by_hydra(error):
        return f"the command line cannot be read ({text}): write KEY=VALUE words, as in seed=1."
    return text


def raised_by_hydra(error: BaseException) -> bool:
    """Whether an error, of whatever class, comes from composing what the user typed."""
    place = error.__traceback__
    if place is None:
        return False
    while place.tb_next is not None:
        place = place.tb_next
    module = str(place.tb_frame.f_globals.get("__name__"))
    return module.split(".")[0] in ("hydra", "omegaconf", "antlr4", "yaml")


def _composition(text: str) -> str:
    key = re.search(r"Could not override '([^']+)'", text)
    if key:
        return (
            f"{key[1]} is no key or group of the configuration: check its spelling (--cfg job "
            f"shows all keys, --help the groups), or write +{key[1]}=VALUE to add it."
        )
    return text.split(" Set the environment variable")[0]
