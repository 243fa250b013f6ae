"""A launched worker takes over what the launching process has composed."""

import logging
import os
import sys
from pathlib import Path

import hydra
from omegaconf import OmegaConf
from tiny import CONF
from worlds import run_world

from metadist.launchers import RunSpec
from metadist.launchers.run_spec import save_configuration
from metadist.launchers.worker import set_up_process


def composed(directory: Path) -> RunSpec:
    overrides = [
        "+model.title=${hydra:job.name}",
        "+model.dir=${hydra:run.dir}",
        "hydra.run.dir=runs/${timeout_seconds}",
        "+hydra.job.env_set.FROM_HYDRA=yes",
    ]
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        configuration = hydra.compose("maml", overrides, return_hydra_config=True)
    node = OmegaConf.masked_copy(configuration, "hydra")
    OmegaConf.set_struct(configuration, False)
    del configuration["hydra"]
    return RunSpec("maml", directory, configuration, tuple(overrides), node, ("/a/module/path",))


def taken_over(text: str) -> tuple:
    """What a process has after it has read a specification."""
    spec = RunSpec.from_yaml(text)
    set_up_process(spec)
    save_configuration(spec)
    stream = logging.getLogger().handlers[0].stream
    variable = os.environ.get("FROM_HYDRA")
    model = spec.configuration.model
    return model.title, model.dir, sys.path[-1], variable, stream is sys.stdout


def test_module_paths_hydra_values_and_logging_are_taken_over(tmp_path):
    spec = composed(tmp_path)
    (found,) = run_world(taken_over, 1, spec.to_yaml())
    assert found == ("maml", "runs/30", "/a/module/path", "yes", True)
    saved = OmegaConf.load(tmp_path / ".hydra" / "hydra.yaml")
    assert OmegaConf.to_container(saved, resolve=False) == OmegaConf.to_container(
        spec.hydra, resolve=False, enum_to_str=True
    )
