"""The experiment of a run that lies in a directory."""

from pathlib import Path

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from metadist.config.experiment import assemble_experiment
from metadist.config.leftovers import drop_leftovers
from metadist.errors import UserError
from metadist.training import Experiment

_IN_THIS_PROCESS = {
    "logger": None,
    "resume": None,
    "strategy": {"_target_": "metadist.training.LocalStrategy"},
}


def load_experiment(directory: Path) -> Experiment:
    """The experiment that a run's `.hydra/config.yaml` describes, fresh, in this process alone.

    The strategy becomes `local` and nothing is logged; the run's checkpoints are left alone.

    Args:
        directory: the run's.

    Raises:
        UserError: no run lies there, or its configuration cannot be used.
    """
    path = directory / ".hydra" / "config.yaml"
    words = path.with_name("overrides.yaml")
    try:
        configuration = OmegaConf.load(path)
        overrides = OmegaConf.to_container(OmegaConf.load(words)) if words.exists() else []
    except OSError as error:
        raise UserError(
            f"{directory} is no run's directory ({path} cannot be read: {error.strerror}): give "
            "the folder that holds .hydra and metrics.jsonl."
        ) from None
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path} is damaged ({reason}): bring back a good copy.") from None
    if not isinstance(configuration, DictConfig) or "trainer" not in configuration:
        raise UserError(f"{path} is damaged (it has no trainer): bring back a good copy.")
    drop_leftovers(configuration, [str(word) for word in overrides])
    with open_dict(configuration):
        configuration.update(_IN_THIS_PROCESS)
        for key in ("partition", "default_partition"):
            if isinstance(configuration.get(key), DictConfig):
                configuration[key].pop("workers", None)  # of another world
    return assemble_experiment(configuration, directory, "replay")
