"""Loads the experiment of an existing run directory."""

from pathlib import Path

import yaml
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from metadist.config.build import assemble_experiment
from metadist.config.instantiate import drop_stale_keys
from metadist.errors import UserError
from metadist.training import Experiment

_SINGLE_PROCESS = {
    "logger": None,
    "resume": None,
    "strategy": {"_target_": "metadist.training.LocalStrategy"},
}


def load_experiment(directory: Path) -> Experiment:
    """The experiment that a run's `.hydra/config.yaml` describes, at iteration 0, in one process.

    The strategy is `local`, nothing is logged, and no checkpoint is read or written.

    Args:
        directory: the run's directory.

    Raises:
        UserError: it is not a run directory, or its configuration cannot be used.
    """
    path = directory / ".hydra" / "config.yaml"
    overrides_path = path.with_name("overrides.yaml")
    try:
        configuration = OmegaConf.load(path)
        saved = overrides_path.read_text("utf-8") if overrides_path.exists() else "[]"
        overrides = yaml.safe_load(saved)
    except OSError as error:
        raise UserError(
            f"{directory} is not a run directory ({path} cannot be read: {error.strerror}): give "
            "the directory that holds .hydra and metrics.jsonl."
        ) from None
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path} is corrupt ({reason}): restore it from a copy.") from None
    if not isinstance(configuration, DictConfig) or "trainer" not in configuration:
        raise UserError(f"{path} is corrupt (it has no trainer): restore it from a copy.")
    drop_stale_keys(configuration, [str(override) for override in overrides])
    with open_dict(configuration):
        configuration.update(_SINGLE_PROCESS)
        for key in ("partition", "default_partition"):
            if isinstance(configuration.get(key), DictConfig):
                configuration[key].pop("workers", None)  # ranks of another job
    return assemble_experiment(configuration, directory, "replay")
