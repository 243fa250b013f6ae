import argparse
import copy
import enum
import functools
import logging
import pickle
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from torch import nn

from metadist.training.compiled_constants import Constants


@dataclass
class Settings:
    """A dataclass among a module's attributes."""

    scale: float = 1.0


@dataclass(slots=True)
class Slots:
    """A dataclass without `__dict__`."""

    scale: float = 1.0


@dataclass
class WithoutValue:
    """A dataclass whose field is not set."""

    value: int = field(init=False)


class Phase(enum.Enum):
    """An enumeration among a module's attributes."""

    FIRST = 1
    SECOND = 2


class Configured(nn.Module):
    """A module with attributes of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.order = [self.layers[1], self.layers[0]]
        self.arguments, self.names = argparse.Namespace(scale=1.0), {1, 2}
        self.options = SimpleNamespace(scale=1.0, nested={"steps": [1, 2]})
        self.table = np.arange(3)
        self.scale = torch.ones(2)
        self.function = torch.relu
        self.method = self.forward
        self.kind = torch.float64
        self.itself = SimpleNamespace()
        self.itself.itself = self.itself
        self.settings, self.slots = Settings(), Slots()
        self.activation = functools.partial(F.leaky_relu, negative_slope=0.1)
        self.generator = np.random.default_rng(0)
        self.logger = logging.getLogger(__name__)
        self._gain = None
        self.phase = Phase.FIRST
        self.unset = WithoutValue()
        self.nothing = [float("nan"), torch.tensor(float("nan")), np.array([float("nan")])]
        self.bound = functools.partial(self.forward)
        self.layer = nn.Tanh()
        self.sizes = OmegaConf.create([1, 2])
        self.pair = (1, [2])

    def forward(self, inputs):
        return inputs


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_a_copy_of_a_learner_has_equal_constants(copied):
    learner = Configured()
    constants = Constants(learner)
    assert constants.changed_names(learner) == constants.changed_names(copied(learner)) == []


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("options", lambda each: setattr(each.options, "scale", 0.5)),
        ("names", lambda each: each.names.add(3)),
        ("arguments", lambda each: setattr(each.arguments, "scale", 0.5)),
        ("settings", lambda each: setattr(each.settings, "scale", 0.5)),
        ("slots", lambda each: setattr(each.slots, "scale", 0.5)),
        ("activation", lambda each: each.activation.keywords.update(negative_slope=0.2)),
        ("phase", lambda each: setattr(each, "phase", Phase.SECOND)),
        ("layer.__class__", lambda each: setattr(each, "layer", nn.Sigmoid())),
        ("_gain", lambda each: setattr(each, "_gain", 0.5)),
        ("_new", lambda each: setattr(each, "_new", 0.5)),
        ("options", lambda each: each.options.nested["steps"].append(3)),
        ("table", lambda each: each.table.fill(0)),
        ("scale", lambda each: each.scale.mul_(2)),
        ("scale", lambda each: setattr(each, "scale", torch.ones(2, dtype=torch.float64))),
        ("order", lambda each: each.order.reverse()),
        ("sizes", lambda each: each.sizes.append(3)),
        ("pair", lambda each: each.pair[1].append(3)),
        ("function", lambda each: setattr(each, "function", torch.tanh)),
        ("kind", lambda each: setattr(each, "kind", torch.float32)),
        ("layers.0.extra", lambda each: setattr(each.layers[0], "extra", 1)),
        ("modules", lambda each: each.layers.append(nn.Linear(2, 2))),
    ],
)
def test_what_changes_is_named(name, change):
    learner = Configured()
    before = Constants(learner)
    change(learner)
    assert before.changed_names(learner) == [name]


@pytest.mark.parametrize(
    "value",
    [
        torch.eye(2).to_sparse(),
        torch.ones(2, device="meta"),
        np.array([np.ones(2), np.ones(3)], dtype=object),
    ],
    ids=["sparse", "meta", "objects"],
)
def test_values_that_cannot_be_compared_have_changed_in_a_copy(value):
    module = nn.Linear(1, 1)
    module.value = value
    constants = Constants(module)
    assert constants.changed_names(copy.deepcopy(module)) == ["value"]


def test_long_ranges_and_bytes_are_compared_as_a_whole():
    module = nn.Linear(1, 1)
    module.positions, module.table = range(10**12), bytes(10)
    constants = Constants(module)
    assert constants.changed_names(copy.deepcopy(module)) == []
    module.positions, module.table = range(10**12 + 1), bytes(11)
    assert constants.changed_names(module) == ["positions", "table"]


def test_parameters_and_buffers_are_no_constants():
    learner = nn.BatchNorm1d(2)
    before = Constants(learner)
    with torch.no_grad():
        learner.weight.zero_()
        learner.running_mean.fill_(7)
    assert before.changed_names(learner) == []


@dataclass
class First:
    """Has the field of `Second`."""

    rate: float = 0.1


@dataclass
class Second:
    """Has the field of `First`."""

    rate: float = 0.1


def test_arrays_of_another_type_and_other_classes_are_changes():
    module = nn.Module()
    module.table, module.kind = np.ones(2, np.float32), First
    constants = Constants(module)
    module.table, module.kind = np.ones(2, np.float64), Second
    assert constants.changed_names(module) == ["table", "kind"]
