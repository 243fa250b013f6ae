"""What a run's directory says of the run beside its results: its configuration, or its failure."""

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from metadist.config import drop_leftovers
from metadist.errors import UserError
from metadist.launchers.launcher import PlannedRun
from metadist.training.identity import flat
from metadist.training.swept_runs import read_record

RESULTS = "results.json"

FAILURE = "failure.json"
"""In the directory of a sweep's job that failed: what was said of it, and the job's overrides."""

LAST_WORDS = "last_words.txt"
"""In the same place for a moment: what the workers of a world said last."""


def write_record(planned: PlannedRun) -> None:
    """Write `.hydra/`: the configuration as it was built from, the words that composed it.

    Rank zero calls it once the experiment could be built, so that a run that was refused leaves
    nothing behind, and what `drop_leftovers` dropped is not listed. Results of an earlier run in
    the directory, such as a shorter one that now goes on, are no longer this one's.
    """
    (planned.directory / RESULTS).unlink(missing_ok=True)
    folder = planned.directory / ".hydra"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(planned.configuration), encoding="utf-8")
    words = OmegaConf.to_yaml(OmegaConf.create(list(planned.overrides)))
    (folder / "overrides.yaml").write_text(words, encoding="utf-8")
    if HydraConfig.initialized():
        hydra = OmegaConf.to_yaml(HydraConfig.instance().cfg)
        (folder / "hydra.yaml").write_text(hydra, encoding="utf-8")
    (planned.directory / FAILURE).unlink(missing_ok=True)


def read_results(directory: Path) -> dict[str, Any] | None:
    """The `results.json` of a run's directory; None where there is none yet.

    Raises:
        UserError: it is there but cannot be read.
    """
    return read_record(directory / RESULTS)


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
    (planned.directory / FAILURE).unlink(missing_ok=True)
    return results


def _values(configuration: DictConfig) -> dict[str, str]:
    found: Any = OmegaConf.to_container(configuration, resolve=True)
    return flat(found)


def note_failure(directory: Path, overrides: Sequence[str], sentence: str, status: int) -> None:
    """Leave word in a job's directory of why it failed. Rank zero, or the parent."""
    with contextlib.suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True)
        word = {"error": sentence, "exit_status": status, "overrides": list(overrides)}
        (directory / FAILURE).write_text(json.dumps(word, indent=2) + "\n", encoding="utf-8")


def last_words(directory: Path) -> str:
    """What the workers of a run that failed said last, in one line; "" if that is not known."""
    try:
        lines = (directory / LAST_WORDS).read_text(encoding="utf-8").strip().splitlines()
        (directory / LAST_WORDS).unlink()
    except OSError:
        return ""
    return lines[-1] if lines else ""
