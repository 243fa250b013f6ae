"""Tensors of a module by name, and calls with other tensors than its own."""

import pytest
import torch
from problems import images
from torch import nn

from metadist.algorithms import MAML
from metadist.algorithms.functional import (
    buffers_by_name,
    call_with,
    parameters_by_name,
    submodules,
)


class Shared(nn.Module):
    """A layer under two names, and another layer with the same weight."""

    def __init__(self) -> None:
        super().__init__()
        layer, other = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
        other.weight = layer.weight
        self.layers = nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), other)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, inputs):
        return self.layers(inputs.flatten(1)[:, :3]) * self.scale


def test_tensors_with_several_names_are_replaced_and_restored():
    module, inputs = Shared(), torch.randn(4, 3)
    before = dict(module.named_parameters(remove_duplicate=False))
    weight, bias = torch.randn(3, 3), torch.randn(3)
    tensors = {"layers.0.weight": weight, "layers.0.bias": bias, "scale": torch.tensor(2.0)}
    found = call_with(module, tensors, inputs)
    once = (inputs @ weight.mT + bias).tanh()
    expected = 2 * (once @ weight.mT + bias).tanh() @ weight.mT
    torch.testing.assert_close(found, expected)
    after = dict(module.named_parameters(remove_duplicate=False))
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before) and module.scale == 1


def test_submodules_and_tensors_are_those_of_pytorch():
    module = Shared()
    module.optional = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2)])
    module.absent = None
    module.register_module("missing", None)
    expected = {m: f"{name}." if name else "" for name, m in module.named_modules()}
    assert list(submodules(module).items()) == list(expected.items())
    for named, found in [
        (dict(module.named_parameters()), parameters_by_name(module)),
        (dict(module.named_buffers()), buffers_by_name(module)),
    ]:
        assert list(found) == list(named) and all(found[name] is named[name] for name in named)
    without = nn.BatchNorm1d(2, track_running_stats=False)  # its buffers are None
    assert buffers_by_name(without) == {}


class Counting(nn.Module):
    """A module that assigns another tensor to its buffer."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.fails = fails
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("nothing", None)

    def forward(self, inputs):
        self.calls = self.calls + 1
        if self.fails:
            raise ValueError("not today")
        return inputs + self.calls


def test_a_buffer_that_is_assigned_is_returned_and_restored():
    module, tensors = Counting(), {"calls": torch.tensor(4.0), "unknown": torch.zeros(())}
    own = module.calls
    assert call_with(module, tensors, torch.zeros(())) == 5
    assert tensors["calls"] == 5 and module.calls is own and own == 0


def test_a_module_is_restored_after_an_error():
    module = Counting(fails=True)
    own = module.calls
    with pytest.raises(ValueError, match="not today"):
        call_with(module, {"calls": torch.ones(())}, torch.zeros(()))
    assert module.calls is own


class Deleting(nn.Module):
    """A module that deletes a buffer before it fails."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("first", torch.zeros(()))
        self.register_buffer("second", torch.zeros(()))

    def forward(self, inputs):
        del self.first
        raise ValueError("not today")


def test_a_deleted_buffer_is_restored():
    module = Deleting()
    own = dict(module.named_buffers())
    with pytest.raises(ValueError, match="not today"):
        call_with(module, {name: torch.ones(()) for name in own}, torch.zeros(()))
    assert all(getattr(module, name) is own[name] for name in own)


def test_a_layer_with_two_names_is_adapted():
    torch.manual_seed(0)
    learner, task = MAML(Shared().double(), inner_lr=0.5), images(ways=3, shots=2, queries=2)
    result = learner(task)
    names = [name for name, _ in learner.named_parameters()]
    assert names == ["model.layers.0.weight", "model.layers.0.bias"]
    model = learner.model
    loss = learner.loss(model(task.support.inputs), task.support.targets)
    grads = torch.autograd.grad(loss, list(model.parameters()))
    with torch.no_grad():
        for parameter, grad in zip(model.parameters(), grads, strict=True):
            parameter -= 0.5 * grad
    expected = learner.loss(model(task.query.inputs), task.query.targets)
    torch.testing.assert_close(result.loss, expected)


class Forgetful(nn.Module):
    """Sets its buffer to None."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, inputs):
        self.seen = None
        return inputs


def test_a_buffer_that_forward_sets_to_none_is_restored():
    module, seen = Forgetful(), torch.ones(2)
    tensors = {"seen": seen}
    call_with(module, tensors, 1)
    assert tensors["seen"] is seen and module.seen.tolist() == [0, 0]
