"""From what Hydra composed to a planned run."""

from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from metadist.launchers.launcher import PlannedRun
from metadist.launchers.set_up import Build
from metadist.training.checkpoints import has_checkpoints

_THE_PARENTS = (
    "hydra.callbacks",
    "hydra.launcher",
    "hydra.mode",
    "hydra.output_subdir",
    "hydra.run.",
    "hydra.sweep",  # and hydra.sweeper
)


def plan(script: Path, build: Build, configuration: DictConfig) -> PlannedRun:
    """The run that Hydra calls its task function for. Any process, inside that function.

    A sweep's job that left checkpoints in its directory is planned to go on from them.

    Args:
        script: the experiment's script.
        build: (configuration, run directory, name) -> the experiment.
        configuration: as composed.
    """
    hydra = HydraConfig.get()
    directory = Path(hydra.runtime.output_dir).resolve()
    in_sweep = hydra.mode == RunMode.MULTIRUN
    mine = configuration.copy()
    with open_dict(mine):
        mine.pop("launcher", None)
        if in_sweep and mine.get("resume") is None and has_checkpoints(directory / "checkpoints"):
            mine.resume = "auto"
    # As typed: a list would resolve the interpolations in them.
    task = OmegaConf.to_container(hydra.overrides.task, resolve=False)
    own = OmegaConf.to_container(hydra.overrides.hydra, resolve=False)
    options = {"main": "--config-path", "command-line": "--config-dir"}
    folders = [
        f"{options[source.provider]}={source.path}"
        for source in hydra.runtime.config_sources
        if source.provider in options and source.path != str(script.parent.parent / "conf")
    ]
    return PlannedRun(
        script=script,
        name=str(hydra.job.config_name),
        directory=directory,
        configuration=mine,
        overrides=tuple(word for word in map(str, task) if not _is_launchers(word)),
        hydra_words=(
            f"--config-name={hydra.job.config_name}",
            *folders,
            *(word for word in map(str, own) if not _key(word).startswith(_THE_PARENTS)),
        ),
        build=build,
        in_sweep=in_sweep,
        number=int(hydra.job.num) if in_sweep else 0,
    )


def _key(word: str) -> str:
    return word.lstrip("+~").partition("=")[0].partition("@")[0].replace("/", ".")


def _is_launchers(word: str) -> bool:
    return _key(word).split(".")[0] == "launcher"
