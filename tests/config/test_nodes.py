"""Building objects from nodes: what is refused, and with which words."""

from typing import Annotated, Literal

import pytest
from annotated_types import Ge

from metadist.config.nodes import build
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
    cart = build({"_target_": CART, "wheel": {"_target_": WHEEL, "spokes": 5}}, "cart", load=2.5)
    assert (cart.wheel.spokes, cart.load) == (5, 2.5)


def test_configured_values_win_over_given_ones():
    assert build({"_target_": WHEEL, "rim": "steel"}, "wheel", rim="wood").rim == "steel"


@pytest.mark.parametrize(
    ("node", "words"),
    [
        ({"_target_": WHEEL, "spokes": 2}, ["wheel.spokes=2", "greater than or equal to 3"]),
        ({"_target_": WHEEL, "spokes": "many"}, ["wheel.spokes=many", "integer"]),
        ({"_target_": WHEEL, "rim": "gold"}, ["wheel.rim=gold", "'wood' or 'steel'"]),
        ({"_target_": WHEEL, "hub": 1}, ["wheel.hub", "spokes, rim"]),
        ({"_target_": CART, "load": 1.0}, ["wheel.wheel", "missing"]),
        ({"_target_": WHEEL, "spokes": 13}, ["nobody builds thirteen"]),
        ({"_target_": "no.such.thing"}, ["no.such.thing", "cannot be imported"]),
        ({"_target_": f"{__name__}.WHEEL"}, ["no class or function"]),
        ("round", ["_target_", "wheel=NAME"]),
    ],
)
def test_refusals_are_one_sentence(node, words):
    with pytest.raises(UserError) as caught:
        build(node, "wheel")
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message
