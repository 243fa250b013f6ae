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


def test_a_sweep_of_hydras_own_composes_each_job_once(loader, tmp_path):
    compositions, seen = [], []
    compose = loader.load_sweep_config

    def counted(master_config, sweep_overrides):
        compositions.append(tuple(sweep_overrides))
        return compose(master_config, sweep_overrides)

    def task(config: DictConfig) -> None:
        seen.append((config.seed, config.task.ways))

    loader.load_sweep_config = counted
    options = ["seed=1,2,1", "task.ways=3", f"hydra.sweep.dir={tmp_path}"]
    GlobalHydra.instance().hydra.multirun("maml", task, options)
    assert seen == [(1, 3), (2, 3), (1, 3)]
    # The job that is there twice: seen to be legal once, and then composed for each run.
    assert sorted(job[0] for job in compositions) == ["seed=1"] * 3 + ["seed=2"]


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
    for _ in range(2):  # seed=1,1: the second is given what the first left
        loader.load_sweep_config(sweep, ["seed=1"])
    run = [loader.load_sweep_config(sweep, ["seed=1"]) for _ in range(2)]
    assert run[0] is not run[1]


def test_a_second_sweep_is_composed_from_its_own_configuration(loader):
    first, second = sweep_of(loader), sweep_of(loader, "hydra.verbose=true")
    compose_once(first)
    loader.load_sweep_config(first, ["seed=1"])  # seen to be legal, never run
    compose_once(second)
    assert loader.load_sweep_config(second, ["seed=1"]).hydra.verbose is True


def test_other_launchers_compose_for_themselves(loader):
    sweep = sweep_of(loader)
    sweep.hydra.launcher._target_ = "hydra_plugins.hydra_joblib_launcher.JoblibLauncher"
    compose_once(sweep)
    one, other = (loader.load_sweep_config(sweep, ["seed=1"]) for _ in range(2))
    assert one is not other
