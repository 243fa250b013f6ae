"""What goes, and what stays, when the command line names another target."""

import pytest
from omegaconf import OmegaConf

from metadist.config import drop_leftovers
from metadist.errors import UserError


class Mine:
    def __init__(self, model: object, inner_lr: float = 0.1, rank: int = 1):
        pass


class Greedy:
    def __init__(self, **options: object):
        pass


COMPOSED = {
    "algorithm": {"_target_": "metadist.algorithms.MAML", "inner_lr": 0.4, "inner_steps": 1},
    "model": {"_target_": "metadist.models.MLP", "hidden": [4]},
}


def dropped(*overrides: str) -> dict:
    configuration = OmegaConf.merge(COMPOSED, OmegaConf.from_dotlist([*overrides]))
    OmegaConf.set_struct(configuration, True)
    drop_leftovers(configuration, overrides)
    return OmegaConf.to_container(configuration)


def test_nothing_goes_without_another_target():
    assert dropped() == COMPOSED
    assert dropped("algorithm.inner_steps=3")["algorithm"].keys() == COMPOSED["algorithm"].keys()


def test_keys_that_the_new_target_does_not_take_go():
    found = dropped(f"algorithm._target_={__name__}.Mine")
    assert found["algorithm"] == {"_target_": f"{__name__}.Mine", "inner_lr": 0.4}
    assert found["model"] == COMPOSED["model"]


def test_keys_of_the_command_line_stay():
    found = dropped(f"algorithm._target_={__name__}.Mine", "algorithm.inner_steps=2")
    assert found["algorithm"]["inner_steps"] == 2


def test_a_target_that_takes_anything_keeps_everything():
    found = dropped(f"algorithm._target_={__name__}.Greedy")
    assert found["algorithm"].keys() == COMPOSED["algorithm"].keys()


def test_a_target_that_is_not_there_is_refused():
    with pytest.raises(UserError, match=r"no\.such\.Thing cannot be imported"):
        dropped("algorithm._target_=no.such.Thing")
