"""What a run's directory says of the run beside its results: its configuration, or its failure."""

from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from metadist.config import drop_leftovers
from metadist.errors import UserError
from metadist.launchers.launcher import PlannedRun
from metadist.reports import FAILURE_FILE, RESULTS_FILE, flatten_config, read_results


def write_record(planned: PlannedRun) -> None:
    """Write `.hydra/`: the configuration as it was built from, the words that composed it.

    Rank zero calls it once the experiment could be built, so that a run that was refused leaves
    nothing behind, and what `drop_leftovers` dropped is not listed. Results of an earlier run in
    the directory, such as a shorter one that now goes on, are no longer this one's.
    """
    (planned.directory / RESULTS_FILE).unlink(missing_ok=True)
    folder = planned.directory / ".hydra"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(planned.configuration), encoding="utf-8")
    words = OmegaConf.to_yaml(OmegaConf.create(list(planned.overrides)))
    (folder / "overrides.yaml").write_text(words, encoding="utf-8")
    if HydraConfig.initialized():
        hydra = OmegaConf.to_yaml(HydraConfig.instance().cfg)
        (folder / "hydra.yaml").write_text(hydra, encoding="utf-8")
    (planned.directory / FAILURE_FILE).unlink(missing_ok=True)


def finished_results(planned: PlannedRun) -> dict[str, Any] | None:
    """The results in a run's directory if they are of this very run; else None.

    Where data lie, what is logged and how processes are started may differ; anything else, such
    as `trainer.iterations`, makes it another run, which is then begun or resumed. Word of a start
    that was refused since is taken away.
    """
    results = read_results(planned.directory)
    if results is None:
        return None
    try:
        saved = OmegaConf.load(planned.directory / ".hydra" / "config.yaml")
        asked = planned.configuration.copy()
        drop_leftovers(asked, planned.overrides)
        same = isinstance(saved, DictConfig) and _values(saved) == _values(asked)
    except (OSError, YAMLError, OmegaConfBaseException, UserError):
        return None
    if not same:
        return None
    (planned.directory / FAILURE_FILE).unlink(missing_ok=True)
    return results


def _values(configuration: DictConfig) -> dict[str, str]:
    found: Any = OmegaConf.to_container(configuration, resolve=True)
    return flatten_config(found)
