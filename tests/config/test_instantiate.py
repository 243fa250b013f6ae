"""Instantiating nodes, with which errors, and stale keys of replaced targets."""

from typing import Annotated, Literal

import pytest
from annotated_types import Ge
from omegaconf import OmegaConf

from metadist.config import drop_stale_keys, instantiate
from metadist.errors import UserError


class Wheel:
    def __init__(self, spokes: Annotated[int, Ge(3)] = 8, rim: Literal["wood", "steel"] = "wood"):
        if spokes == 13:
            raise ValueError("nobody builds thirteen")
        self.spokes, self.rim = spokes, rim


class Cart:
    def __init__(self, wheel: Wheel, load: float):
        self.wheel, self.load = wheel, load


WHEEL = f"{__name__}.Wheel"
CART = f"{__name__}.Cart"


def test_builds_with_given_and_nested_objects():
    cart = instantiate(
        {"_target_": CART, "wheel": {"_target_": WHEEL, "spokes": 5}}, "cart", load=2.5
    )
    assert (cart.wheel.spokes, cart.load) == (5, 2.5)


def test_configured_values_win_over_given_ones():
    assert instantiate({"_target_": WHEEL, "rim": "steel"}, "wheel", rim="wood").rim == "steel"


@pytest.mark.parametrize(
    ("node", "parts"),
    [
        ({"_target_": WHEEL, "spokes": 2}, ["wheel.spokes=2", "greater than or equal to 3"]),
        ({"_target_": WHEEL, "spokes": "many"}, ["wheel.spokes=many", "integer"]),
        ({"_target_": WHEEL, "rim": "gold"}, ["wheel.rim=gold", "'wood' or 'steel'"]),
        ({"_target_": WHEEL, "hub": 1}, ["wheel.hub", "spokes, rim"]),
        ({"_target_": CART, "load": 1.0}, ["wheel.wheel", "missing"]),
        ({"_target_": WHEEL, "spokes": 13}, ["nobody builds thirteen"]),
        ({"_target_": "no.such.thing"}, ["no.such.thing", "cannot be imported"]),
        ({"_target_": f"{__name__}.WHEEL"}, ["not a class or function"]),
        ("round", ["_target_", "wheel=NAME"]),
    ],
)
def test_refusals_are_one_sentence(node, parts):
    with pytest.raises(UserError) as caught:
        instantiate(node, "wheel")
    message = str(caught.value)
    assert "\n" not in message
    assert all(part in message for part in parts), message


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
    drop_stale_keys(configuration, overrides)
    return OmegaConf.to_container(configuration)


def test_no_key_is_stale_without_another_target():
    assert dropped() == COMPOSED
    assert dropped("algorithm.inner_steps=3")["algorithm"].keys() == COMPOSED["algorithm"].keys()


def test_keys_that_the_new_target_does_not_accept_are_dropped():
    found = dropped(f"algorithm._target_={__name__}.Mine")
    assert found["algorithm"] == {"_target_": f"{__name__}.Mine", "inner_lr": 0.4}
    assert found["model"] == COMPOSED["model"]


def test_keys_of_the_command_line_are_kept():
    found = dropped(f"algorithm._target_={__name__}.Mine", "algorithm.inner_steps=2")
    assert found["algorithm"]["inner_steps"] == 2


def test_a_target_with_kwargs_keeps_all_keys():
    found = dropped(f"algorithm._target_={__name__}.Greedy")
    assert found["algorithm"].keys() == COMPOSED["algorithm"].keys()


def test_a_target_that_does_not_exist_is_refused():
    with pytest.raises(UserError, match=r"no\.such\.Thing cannot be imported"):
        dropped("algorithm._target_=no.such.Thing")
