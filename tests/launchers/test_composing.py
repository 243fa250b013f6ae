"""A sweep's job composed once, and given once."""

import pytest
from commands import ROOT
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from metadist.launchers.composing import compose_once
from metadist.launchers.resolvers import register_resolvers


@pytest.fixture
def loader():
    register_resolvers()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        yield GlobalHydra.instance().config_loader()


def sweep_of(loader, *overrides: str) -> DictConfig:
    return loader.load_configuration("maml", list(overrides), RunMode.MULTIRUN)


def words(config: DictConfig) -> dict:
    return OmegaConf.to_container(config.task) | {"seed": config.seed}


def test_the_launcher_gets_what_the_sweeper_composed(loader):
    sweep = sweep_of(loader)
    jobs = [["task.ways=3", f"seed={seed}"] for seed in range(2)]
    plain = [loader.load_sweep_config(sweep, job) for job in jobs]
    compose_once(sweep)
    legal = [loader.load_sweep_config(sweep, job) for job in jobs]
    run = [loader.load_sweep_config(sweep, job) for job in jobs]
    for seed in range(2):
        assert run[seed] is legal[seed]
        assert words(run[seed]) == words(plain[seed])
        assert run[seed].seed == seed and run[seed].task.ways == 3


def test_no_configuration_is_run_twice(loader):
    sweep = sweep_of(loader)
    compose_once(sweep)
    legal = [loader.load_sweep_config(sweep, ["seed=1"]) for _ in range(2)]  # seed=1,1
    run = [loader.load_sweep_config(sweep, ["seed=1"]) for _ in range(2)]
    assert legal and run[0] is not run[1]


def test_other_launchers_compose_for_themselves(loader):
    sweep = sweep_of(loader)
    sweep.hydra.launcher._target_ = "hydra_plugins.hydra_joblib_launcher.JoblibLauncher"
    compose_once(sweep)
    assert loader.load_sweep_config(sweep, ["seed=1"]) is not loader.load_sweep_config(
        sweep, ["seed=1"]
    )
