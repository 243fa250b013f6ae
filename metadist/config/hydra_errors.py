"""One-sentence messages for errors of Hydra, OmegaConf and the operating system."""

import re

from hydra.errors import (
    ConfigCompositionException,
    InstantiationException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from metadist.config.schema import nearest_key

_SWEEPS_EXTRA = ("optuna", "joblib", "submitit")
"""Hydra's sweepers and launchers that the extra `sweeps` installs."""


def describe_error(error: BaseException) -> str:
    """What was wrong, what was expected and what to do, in one line.

    Args:
        error: of Hydra, OmegaConf or the operating system; the text of any other is unchanged.
    """
    text = " ".join(str(error).split())
    if isinstance(error, MissingConfigException) and error.options:
        group, _, option = str(error.missing_cfg_file or "").rpartition("/")
        options = ", ".join(sorted(error.options))
        if group in ("hydra/launcher", "hydra/sweeper") and option.startswith(_SWEEPS_EXTRA):
            return f"{group}={option} is not installed: pip install -e '.[sweeps]'."
        return f"{group}={option} is not an option of {group}: choose one of {options}."
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
        return f"the command line cannot be read ({text}): write KEY=VALUE, as in seed=1."
    return text


def raised_by_hydra(error: BaseException) -> bool:
    """Whether an error, of any class, was raised inside Hydra, OmegaConf or their parsers."""
    frame = error.__traceback__
    if frame is None:
        return False
    while frame.tb_next is not None:
        frame = frame.tb_next
    module = str(frame.tb_frame.f_globals.get("__name__"))
    return module.split(".")[0] in ("hydra", "omegaconf", "antlr4", "yaml")


def _composition(text: str) -> str:
    match = re.search(r"Could not override '([^']+)'", text)
    if match is None:
        return text.split(" Set the environment variable")[0]
    key = match[1]
    near = None if "." in key else nearest_key(key)
    if near == key:
        return f"{key} is not in the defaults list: write +{key}=VALUE to add it."
    guess = f" (did you mean {near}?)" if near else ""
    add = f", or write +{key}=VALUE to add it" if "." in key else ""  # no new top-level keys
    return (
        f"{key} is not a key or group of the configuration{guess}: check its spelling (--cfg job "
        f"shows all keys, --help the groups){add}."
    )
