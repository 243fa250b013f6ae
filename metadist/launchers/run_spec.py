"""A job as data, and the files of the run's directory in which it is saved."""

import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from metadist.config import Settings, resolve_external, to_plain, validate
from metadist.config.plain import redact_secrets
from metadist.config.trusted import check_interpolations
from metadist.errors import UserError
from metadist.files import atomic_write, rename_to_next_number
from metadist.reports import (
    CONFIG_FILE,
    ERROR_FILE,
    FAILURE_FILE,
    HYDRA_FILE,
    OVERRIDES_FILE,
    RESULTS_FILE,
    TEST_PREDICTIONS_FILE,
    TEST_TASKS_DATA_FILE,
    flatten_config,
    is_runtime_key,
    read_config,
    read_results,
)

CONSOLE_FILE = "console.log"
"""The file for the standard output of a launched job, if other jobs run at the same time."""


@dataclass(frozen=True)
class RunSpec:
    """The data that a process needs to run a job, without objects of the experiment.

    Attributes:
        name: the experiment's name, which is the name of its configuration file.
        directory: the run's directory, of which the absolute path is kept.
        configuration: the composed configuration with unresolved interpolations, without Hydra's
            node and without `launcher`.
        overrides: the command-line overrides of the configuration, as typed; in a sweep, the
            overrides of this job.
        hydra: Hydra's own node, under the key `hydra`; None without Hydra.
        module_paths: the search path for modules of the composing process (`sys.path`).
        in_sweep: whether this is a job of a sweep. If it has finished before, it is not run again.
        number: the number of the job in its sweep, from 0.
        concurrent: whether other jobs run at the same time; workers then print to `CONSOLE_FILE`.
        launched: whether a launcher started this process for the job. In a sweep, the launching
            process has already looked for finished results.
    """

    name: str
    directory: Path
    configuration: DictConfig
    overrides: tuple[str, ...] = ()
    hydra: DictConfig | None = None
    module_paths: tuple[str, ...] = field(default_factory=lambda: tuple(sys.path))
    in_sweep: bool = False
    number: int = 0
    concurrent: bool = False
    launched: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "directory", Path(self.directory).resolve())

    @cached_property
    def settings(self) -> Settings:
        """The top level of the configuration, checked once.

        Raises:
            UserError: the configuration is invalid; see `validate`.
        """
        return validate(self.configuration)

    def to_yaml(self) -> str:
        """The specification as text, for another process; see `from_yaml`."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        plain = {
            "directory": str(self.directory),
            "configuration": to_plain(self.configuration, resolve=False),
            "overrides": list(self.overrides),
            "hydra": None if self.hydra is None else to_plain(self.hydra, resolve=False),
            "module_paths": list(self.module_paths),
        }
        return yaml.safe_dump(fields | plain, allow_unicode=True, sort_keys=False)

    @classmethod
    def from_yaml(cls, text: str) -> "RunSpec":
        """Read a specification that `to_yaml` wrote. No code in the text is executed."""
        fields = yaml.safe_load(text)
        configuration = OmegaConf.create(fields["configuration"])
        OmegaConf.set_struct(configuration, True)
        converted = {
            "configuration": configuration,
            "overrides": tuple(fields["overrides"]),
            "hydra": None if fields["hydra"] is None else OmegaConf.create(fields["hydra"]),
            "module_paths": tuple(fields["module_paths"]),
        }
        return cls(**fields | converted)


def begin_run_directory(spec: RunSpec) -> None:
    """Write `.hydra/`, and put away what an earlier run in the directory left.

    Rank zero calls it once the experiment is built, so that a refused run leaves no files. Earlier
    results, such as those of a shorter run that is now continued, are renamed to `results.json.1`
    and so on; a record of an error is deleted.
    """
    names = (RESULTS_FILE, TEST_PREDICTIONS_FILE, TEST_TASKS_DATA_FILE)
    rename_to_next_number(*(spec.directory / name for name in names))
    for name in (FAILURE_FILE, ERROR_FILE):
        (spec.directory / name).unlink(missing_ok=True)
    save_configuration(spec)


def save_configuration(spec: RunSpec) -> None:
    """Write `.hydra/`: the configuration of the experiment, the overrides, and Hydra's node.

    `${oc.env:…}` and `${hydra:…}` have the values of this process; see `resolve_external`.
    """
    (spec.directory / CONFIG_FILE).parent.mkdir(parents=True, exist_ok=True)
    texts = {
        CONFIG_FILE: OmegaConf.to_yaml(OmegaConf.create(_saved_values(spec.configuration))),
        OVERRIDES_FILE: yaml.safe_dump(list(spec.overrides), allow_unicode=True),
    }
    if spec.hydra is not None:
        # `hydra.job.env_copy` copies values of the environment into it.
        values = redact_secrets(to_plain(spec.hydra, resolve=False))
        texts[HYDRA_FILE] = OmegaConf.to_yaml(OmegaConf.create(values))
    for name, text in texts.items():
        atomic_write(spec.directory / name, text.encode())


def finished_results(spec: RunSpec) -> dict[str, Any] | None:
    """The results in the run's directory if they are of the same run, else None.

    The loggers and the launcher may differ. With any other difference, such as in `dataset.root` or
    `trainer.iterations`, it is a different run, which is started or resumed.

    Raises:
        UserError: the results exist but cannot be read.
    """
    results = read_results(spec.directory)
    if results is None:
        return None
    try:
        saved = read_config(spec.directory)
    except UserError:
        return None
    if _resolved(saved) != _resolved(_saved_values(spec.configuration)):
        return None
    return results


def results_summary(results: Mapping[str, Any]) -> str:
    """The validation and test metrics of a run, such as "test accuracy 0.75"."""
    names = ("validation_accuracy", "validation_mse", "test_accuracy", "test_mse")
    shown = [name for name in names if isinstance(results.get(name), int | float)]
    return ", ".join(f"{name.replace('_', ' ')} {results[name]:.4g}" for name in shown)


def _saved_values(configuration: DictConfig) -> dict[str, Any]:
    """The values of a configuration as they are saved."""
    return to_plain(resolve_external(configuration), resolve=False)


def _resolved(values: dict[str, Any]) -> dict[str, str]:
    """Saved values by dotted key, resolved unless an interpolation may execute code."""
    values = {key: value for key, value in values.items() if not is_runtime_key(key)}
    with suppress(UserError, OmegaConfBaseException):
        check_interpolations(values)
        values = to_plain(OmegaConf.create(values), resolve=True)
    return flatten_config(values)
