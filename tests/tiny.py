"""Shrunken experiments: the real configuration with small numbers."""

import copy
import functools
import json
import re
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig
from worlds import run_world

from metadist.config import build_experiment
from metadist.launchers import RunSpec, run_job
from metadist.training import Experiment, Trainer

CONF = Path(__file__).resolve().parent.parent / "conf"
GROUPS = "|".join(path.name for path in CONF.iterdir() if path.is_dir())
OPTION = re.compile(rf"[+~]*(({GROUPS})(=|$)|hydra\.)")
"""An override that chooses an option of a group, or one of Hydra's own."""

SMALL = [
    "++dataset.train_classes=12",
    "++dataset.validation_classes=6",
    "++dataset.test_classes=6",
    "++dataset.examples=6",
    "task.ways=3",
    "task.queries=2",
    "model.filters=4",
    "trainer.iterations=4",
    "trainer.meta_batch_size=5",
    "trainer.eval_every=2",
    "trainer.validation_tasks=3",
    "trainer.eval_tasks=7",
    "trainer.checkpoint_every=2",
    "logger=jsonl",
    "trainer.report=false",
]
"""Overrides for `conf/maml.yaml` with which a run takes about a second."""


@functools.cache
def _options(name: str, overrides: tuple[str, ...]) -> DictConfig:
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        return hydra.compose(name, list(overrides))


def compose(*overrides: str, name: str = "maml") -> DictConfig:
    """The composed configuration of an experiment, with `overrides` alone.

    Options take most of the time. They are composed once; then values are set, as Hydra does.
    """
    chosen = tuple(each for each in overrides if OPTION.match(each))
    values = OverridesParser.create().parse_overrides([o for o in overrides if o not in chosen])
    configuration = copy.deepcopy(_options(name, chosen))
    ConfigLoaderImpl._apply_overrides_to_config(values, configuration)  # noqa: SLF001
    return configuration


def build(
    directory: Path | str, *overrides: str, name: str = "maml", omit: tuple[str, ...] = ()
) -> Experiment:
    """A shrunken experiment on this rank, without the overrides of `SMALL` that `omit` begins."""
    small = [override for override in SMALL if not override.startswith(omit)] if omit else SMALL
    configuration = compose(*small, *overrides, name=name)
    return build_experiment(configuration, Path(directory), name)


def train(directory: str, *overrides: str, name: str = "maml") -> dict[str, Any]:
    """Build and run a shrunken experiment on this rank; its results."""
    return Trainer(build(directory, *overrides, name=name)).run()


def train_world(size: int, directory: Path, *overrides: str, **world: Any) -> list[Any]:
    """Run a shrunken experiment, composed once, in a world; the results of each rank."""
    configuration = compose(*SMALL, *overrides)
    return run_world(train_composed, size, directory, configuration, **world)


def train_composed(directory: Path | str, configuration: DictConfig) -> dict[str, Any]:
    """Build and run a composed experiment on this rank; its results."""
    return Trainer(build_experiment(configuration, Path(directory), "maml")).run()


def finished_run(directory: Path, *overrides: str) -> Path:
    """Run a shrunken experiment as a job of its own process, as a command does; its directory."""
    directory.mkdir()
    configuration = compose(*SMALL, "strategy=local", *overrides)
    run_world(run_job, 1, RunSpec("maml", directory, configuration, overrides))
    return directory


def run_results(directory: Path) -> dict[str, Any]:
    """A run's `results.json`."""
    return json.loads((Path(directory) / "results.json").read_text(encoding="utf-8"))


def records(directory: Path) -> list[dict[str, Any]]:
    """The lines of a run's `metrics.jsonl`."""
    lines = (Path(directory) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def without_times(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records without the fields that measure time."""
    times = ("seconds", "tasks_per_second", "samples_per_second")
    return [{key: value for key, value in line.items() if key not in times} for line in lines]
