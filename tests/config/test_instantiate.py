"""Instantiating nodes, with which errors."""

import functools
from typing import Annotated, Literal

import pytest
from annotated_types import Ge
from omegaconf import OmegaConf

from metadist.config import instantiate
from metadist.errors import UserError


class Wheel:
    def __init__(self, spokes: Annotated[int, Ge(3)] = 8, rim: Literal["wood", "steel"] = "wood"):
        if spokes == 13:
            raise ValueError("nobody builds thirteen")
        self.spokes, self.rim = spokes, rim


class Cart:
    def __init__(self, wheel: Wheel, load: float):
        self.wheel, self.load = wheel, load


class Lamp:
    def __init__(self, lit: bool, watts: float | bool = 1.0, bulbs: int = 1):
        self.values = (lit, watts)


LAMP = f"{__name__}.Lamp"
WHEEL = f"{__name__}.Wheel"
CART = f"{__name__}.Cart"


def test_builds_with_given_and_nested_objects():
    cart = instantiate(
        {"_target_": CART, "wheel": {"_target_": WHEEL, "spokes": 5}}, "cart", load=2.5
    )
    assert (cart.wheel.spokes, cart.load) == (5, 2.5)


class Train:
    def __init__(self, carts: list[Cart], spare: dict[str, list[Wheel]] | None = None):
        self.carts, self.spare = carts, spare


def test_builds_nodes_in_lists_and_dictionaries():
    cart = {"_target_": CART, "wheel": {"_target_": WHEEL}, "load": 1.0}
    spare = {"front": [{"_target_": WHEEL, "spokes": 4}, {"_target_": WHEEL}]}
    node = {"_target_": f"{__name__}.Train", "carts": [cart, cart], "spare": spare}
    for given in (node, OmegaConf.create(node)):
        train = instantiate(given, "train")
        assert [type(each.wheel) for each in train.carts] == [Wheel, Wheel]
        assert [each.spokes for each in train.spare["front"]] == [4, 8]
    spare["front"][1]["spokes"] = 2
    with pytest.raises(UserError, match=r"train\.spare\.front\.1\.spokes=2 does not fit"):
        instantiate(node, "train")


@pytest.mark.parametrize(
    ("target", "key"), [(f"{__name__}.Train", "carts"), ("metadist.models.MLP", "hidden")]
)
def test_a_value_in_place_of_a_list(target, key):
    message = rf"one\.{key}=40 does not fit: it must be a list, as in one\.{key}=\[40\]\."
    with pytest.raises(UserError, match=message):
        instantiate({"_target_": target, key: 40}, "one", input_shape=(1,), outputs=1)


def test_the_texts_that_an_option_takes_too_are_named():
    message = r"compile=maybe does not fit: .* valid boolean.*, or 'auto'\."
    with pytest.raises(UserError, match=message):
        instantiate({"_target_": "metadist.training.TrainerConfig", "compile": "maybe"}, "trainer")


def test_a_number_in_place_of_a_pair():
    node = {"_target_": "torch.optim.Adam", "betas": 0.9}
    with pytest.raises(UserError, match=r"betas=0\.9 does not fit: it must be a list, in square"):
        instantiate(node, "optimizer", params=[])


def test_a_number_in_place_of_a_text():
    message = r"data\.root=2024 does not fit: it must be a text, as in 'data\.root=\"2024\"'\."
    with pytest.raises(UserError, match=message):
        instantiate({"_target_": "metadist.tasks.ImageFolder", "root": 2024}, "data")


def test_partial_nodes_are_functions_of_what_is_missing():
    node = {"_target_": CART, "_partial_": True, "wheel": {"_target_": WHEEL, "spokes": 5}}
    make = instantiate(node, "cart")
    assert isinstance(make, functools.partial)
    assert (make(load=1.5).load, make(load=2.5).wheel.spokes) == (1.5, 5)
    assert instantiate({"_target_": WHEEL, "_partial_": False}, "wheel").spokes == 8


def test_numbers_and_truth_values_are_converted_to_the_types_of_the_signature():
    wheel = {"_target_": WHEEL}
    cart = instantiate({"_target_": CART, "wheel": wheel, "load": 3}, "cart")
    assert cart.load == 3.0 and type(cart.load) is float
    assert instantiate({"_target_": WHEEL, "spokes": "5"}, "wheel").spokes == 5
    assert instantiate({"_target_": LAMP, "lit": True, "watts": False}, "lamp").values == (
        True,
        False,
    )


def test_configured_values_win_over_given_ones():
    assert instantiate({"_target_": WHEEL, "rim": "steel"}, "wheel", rim="wood").rim == "steel"


@pytest.mark.parametrize(
    ("node", "parts"),
    [
        ({"_target_": WHEEL, "spokes": 2}, ["wheel.spokes=2", "greater than or equal to 3"]),
        ({"_target_": WHEEL, "spokes": "many"}, ["wheel.spokes=many", "integer"]),
        ({"_target_": WHEEL, "rim": "gold"}, ["wheel.rim=gold", "'wood' or 'steel'"]),
        (
            {"_target_": LAMP, "lit": True, "bulbs": True},
            ["wheel.bulbs=True", "must be a number"],
        ),
        (
            {"_target_": CART, "wheel": {"_target_": WHEEL}, "load": True},
            ["wheel.load=True", "must be a number"],
        ),
        ({"_target_": WHEEL, "hub": 1}, ["wheel.hub", "spokes, rim"]),
        ({"_target_": CART, "load": 1.0}, ["wheel.wheel", "missing"]),
        ({"_target_": WHEEL, "spokes": 13}, ["nobody builds thirteen", "test_instantiate.py:"]),
        ({"_target_": "no.such.thing"}, ["no.such.thing", "there is no module no:"]),
        ({"_target_": f"{__name__}.Weel"}, [f"module {__name__} has no Weel", "mean Wheel?"]),
        ({"_target_": "metadist.models.Conv5"}, ["metadist.models has no Conv5", "mean Conv4?"]),
        ({"_target_": WHEEL, "spoke": 9}, ["wheel.spoke ", "did you mean spokes?"]),
        ({"_target_": WHEEL, "_args_": [9]}, ["wheel._args_ is not supported"]),
        ({"_target_": WHEEL, "_partial_": "yes"}, ["wheel._partial_=yes", "true or false"]),
        ({"_target_": WHEEL, "_partial_": True, "hub": 1}, ["wheel.hub", "spokes, rim"]),
        ({"_target_": f"{__name__}.WHEEL"}, ["not a class or function"]),
        (OmegaConf.create({"a": {"_target_": WHEEL, "rim": "???"}}).a, ["a.rim is missing: give"]),
        ("round", ["_target_", "wheel=NAME"]),
    ],
)
def test_refusals_are_one_sentence(node, parts):
    with pytest.raises(UserError) as caught:
        instantiate(node, "wheel")
    message = str(caught.value)
    assert "\n" not in message
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("path", "advice"),
    [
        ("reducer", "as in reducer=NAME."),
        ("partition", "as in +partition=NAME."),
        ("default_partition", "one of the options of partition, as in +partition=NAME."),
        ("callbacks.ema", "as in +callbacks.ema._target_=CLASS."),
    ],
)
def test_a_node_without_a_class_names_the_override_that_gives_one(path, advice):
    with pytest.raises(UserError) as caught:
        instantiate({"decay": 0.5}, path)
    assert str(caught.value).endswith(advice)


def test_options_are_those_that_are_not_given():
    with pytest.raises(UserError, match=r"its options are rim\.$"):
        instantiate({"_target_": WHEEL, "hub": 1}, "wheel", spokes=9)


def test_a_function_may_be_taken_uncalled():
    target = f"{__name__}.needs_a_wheel"
    with pytest.raises(UserError, match=r"cart\.wheel is missing.*cart\._partial_=true takes it"):
        instantiate({"_target_": target}, "cart")
    assert instantiate({"_target_": target, "_partial_": True}, "cart")(3) == 3


def needs_a_wheel(wheel):
    return wheel


class Barrow(Cart):
    def __init__(self, handles: int = 2, **options):
        super().__init__(**options)
        self.handles = handles


class Crate:
    def __init__(self, size: "NotImported", count: int = 1, **options):  # noqa: F821
        self.size, self.count, self.options = size, count, options


def test_what_base_classes_accept_is_given_to_a_class_with_keyword_arguments():
    node = {"_target_": f"{__name__}.Barrow", "handles": 1}
    barrow = instantiate(node, "barrow", wheel=Wheel(), load=2.5, color="red")
    assert (barrow.handles, barrow.load) == (1, 2.5)
    crate = instantiate({"_target_": f"{__name__}.Crate", "size": 3}, "crate", load=2.5)
    assert crate.options == {}


def test_type_hints_that_cannot_be_resolved_are_not_checked():
    crate = instantiate({"_target_": f"{__name__}.Crate", "size": 3, "count": "4"}, "crate")
    assert (crate.size, crate.count) == (3, 4)


class Barrel:
    def __init__(self, litres: float, cork: "Cork" = None, lid: "float" = 1.0):  # noqa: F821
        self.litres, self.lid = litres, lid


class Cooper:
    """Its calls build barrels."""

    def __call__(self, litres: float) -> Barrel:
        return Barrel(litres)


cooper = Cooper()
ten_litres = functools.partial(Barrel, litres=10.0)


@pytest.mark.parametrize("key", ["litres", "lid"])
def test_a_type_that_cannot_be_found_leaves_the_others_checked(key):
    node = {"_target_": f"{__name__}.Barrel", "litres": 1, key: "full"}
    with pytest.raises(UserError, match=f"barrel.{key}=full does not fit"):
        instantiate(node, "barrel")


def test_objects_that_can_be_called_are_targets():
    assert instantiate({"_target_": f"{__name__}.cooper", "litres": "2"}, "x").litres == 2.0
    assert instantiate({"_target_": f"{__name__}.ten_litres", "lid": "3"}, "x").lid == 3.0


def test_a_target_without_options_is_named():
    with pytest.raises(UserError, match=r"x.size is not an option of Cooper: it has no options\."):
        instantiate({"_target_": f"{__name__}.Cooper", "size": 1}, "x")


class Sledge:
    def __init__(self, width: int):
        if width < 0:
            raise ValueError("width is negative")
        self.size, self.rest = [width] * 3  # a bug


def test_a_bug_in_the_users_class_is_no_wrong_argument():
    node = {"_target_": f"{__name__}.Sledge", "width": 2}
    with pytest.raises(ValueError, match="too many values to unpack"):
        instantiate(node, "part")
    with pytest.raises(UserError, match=r"part: invalid arguments for .*width is negative"):
        instantiate(node | {"width": -1}, "part")
