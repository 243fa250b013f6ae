"""Clones of modules: whose parameters they hold, whose graph, whose buffers."""

import copy
import threading

import pytest
import torch
from torch import nn

import metadist as todist
from metadist.distributed.modules import unpicklable_part

CLONES = ["clone", "copy"]
METHODS = ["reference", "clone", "copy", "deepcopy"]


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)).double()


def make_batch() -> torch.Tensor:
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(1)).double()


@pytest.mark.parametrize("by", METHODS)
@pytest.mark.parametrize("device", [None, "cpu"])
def test_a_clone_computes_what_the_original_computes(by, device):
    model = make_model()
    clone = todist.module_clone(model, by=by, device=device)
    assert clone is not model and type(clone) is nn.Sequential and clone[0] is not model[0]
    assert [name for name, _ in clone.named_parameters()] == [
        name for name, _ in model.named_parameters()
    ]
    expected = copy.deepcopy(model)(make_batch())
    torch.testing.assert_close(clone(make_batch()), expected, rtol=0, atol=0)


@pytest.mark.parametrize("by", CLONES)
def test_clones_are_plain_tensors_with_a_graph_to_the_originals(by):
    model = make_model()
    clone = todist.module_clone(model, by=by)
    for tensor, parameter in zip(clone.parameters(), model.parameters(), strict=True):
        assert type(tensor) is torch.Tensor and "Clone" in type(tensor.grad_fn).__name__
        assert tensor.data_ptr() != parameter.data_ptr()
    reference = copy.deepcopy(model)
    clone(make_batch()).square().sum().backward()
    reference(make_batch()).square().sum().backward()
    for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad, rtol=0, atol=0)


def test_a_reference_holds_the_originals_parameters_until_they_are_replaced():
    model = make_model()
    clone = todist.module_clone(model, by="reference")
    for mine, parameter in zip(clone.parameters(), model.parameters(), strict=True):
        assert mine is parameter
    weight = model[0].weight
    clone[0]._parameters["weight"] = weight - 1
    assert model[0].weight is weight and clone[0].weight is not weight


def test_a_deep_copy_has_nothing_in_common():
    model = make_model()
    clone = todist.module_clone(model, by="deepcopy")
    for mine, parameter in zip(clone.parameters(), model.parameters(), strict=True):
        assert type(mine) is nn.Parameter and mine.is_leaf
        assert mine.data_ptr() != parameter.data_ptr()
    clone(make_batch()).sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("by", "detach_buffers", "shared"),
    [
        ("reference", False, True),
        ("reference", True, False),
        ("clone", False, False),
        ("copy", True, False),
        ("deepcopy", False, False),
    ],
)
def test_running_statistics_of_the_original_move_only_when_shared(by, detach_buffers, shared):
    model = make_model()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    clone = todist.module_clone(model, by=by, detach_buffers=detach_buffers)
    clone(make_batch())
    batch_mean = model[0](make_batch()).detach().mean(0)
    torch.testing.assert_close(clone[1].running_mean, 0.1 * batch_mean)
    if shared:
        assert model[1].running_mean is clone[1].running_mean
    else:
        for name, buffer in model.named_buffers():
            torch.testing.assert_close(buffer, before[name], rtol=0, atol=0)


@pytest.mark.parametrize("by", METHODS)
def test_a_clone_may_be_on_another_device(by):
    model = make_model()
    clone = todist.module_clone(model, by=by, device="meta")
    for mine, own in ((clone.parameters(), model.parameters()), (clone.buffers(), model.buffers())):
        assert {each.device.type for each in mine} == {"meta"}
        assert {each.device.type for each in own} == {"cpu"}
    if by in CLONES:
        assert all(each.grad_fn is not None for each in clone.parameters())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(3, 3)
        self.decoder = nn.Linear(3, 3)
        self.decoder.weight = self.encoder.weight
        self.first = self.second = nn.Linear(3, 3)
        self.register_parameter("absent", None)
        self.optional = None
        self.add_module("nothing", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.decoder(torch.tanh(self.first(self.encoder(x)))))


@pytest.mark.parametrize("by", METHODS)
def test_tied_parameters_and_repeated_modules_stay_so(by):
    torch.manual_seed(0)
    model = Tied()
    clone = todist.module_clone(model, by=by)
    assert clone.encoder.weight is clone.decoder.weight
    assert clone.first is clone.second and clone.first is not model.first
    assert clone.absent is None and clone.nothing is None
    assert len(list(clone.parameters())) == len(list(model.parameters())) == 5
    if by in CLONES:
        reference = copy.deepcopy(model)
        x = torch.randn(4, 3)
        clone(x).square().sum().backward()
        reference(x).square().sum().backward()
        for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, expected.grad)


@pytest.mark.parametrize("by", CLONES)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_modules_compute_with_the_clones_tensors(by, kind):
    torch.manual_seed(0)
    model = kind(3, 4, num_layers=2)
    clone = todist.module_clone(model, by=by)
    with torch.no_grad():
        for tensor in clone.parameters():
            tensor.zero_()
    output, _ = clone(torch.randn(5, 2, 3))
    assert torch.equal(output, torch.zeros(5, 2, 4))
    assert model(torch.randn(5, 2, 3))[0].abs().sum() > 0


@pytest.mark.parametrize("by", METHODS)
def test_setting_a_recurrent_clones_weight_leaves_the_original_alone(by):
    torch.manual_seed(0)
    model, x = nn.LSTM(3, 4), torch.randn(5, 2, 3)
    before = model(x)[0]
    clone = todist.module_clone(model, by=by)
    for tensor, own in zip(clone._flat_weights, clone.parameters(), strict=True):
        assert tensor is own
    for name, tensor in dict(clone.named_parameters()).items():
        del clone._parameters[name]
        setattr(clone, name, torch.zeros_like(tensor))
    assert torch.equal(model(x)[0], before)
    assert torch.equal(clone(x)[0], torch.zeros(5, 2, 4))


@pytest.mark.parametrize("by", METHODS)
def test_a_clone_has_the_originals_hooks_and_registers_its_own(by):
    model, seen = nn.Linear(2, 2), []
    model.register_forward_hook(lambda *_: seen.append("original's"))
    clone = todist.module_clone(model, by=by)
    clone.register_forward_hook(lambda *_: seen.append("clone's"))
    clone.register_forward_pre_hook(lambda *_: seen.append("before"))
    clone.register_buffer("count", torch.zeros(1), persistent=False)
    model.register_buffer("count", torch.zeros(1))
    model(torch.ones(1, 2))
    assert seen == ["original's"]
    clone(torch.ones(1, 2))
    assert seen == ["original's", "before", "original's", "clone's"]
    assert "count" in model.state_dict() and "count" not in clone.state_dict()


def test_a_module_inside_itself_is_cloned_once():
    model = nn.Linear(2, 2)
    model.__dict__["_modules"] = {"me": model}
    clone = todist.module_clone(model, by="clone")
    assert clone.me is clone and clone is not model


class Counting(nn.Linear):
    """A layer that counts its calls in a hook of its own."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.calls = 0
        self.register_forward_hook(self.count)

    def count(self, *_: object) -> None:
        self.calls += 1


@pytest.mark.parametrize("by", ["reference", "clone", "deepcopy"])
def test_hooks_that_are_methods_are_those_of_the_clone(by):
    model = nn.Sequential(Counting())
    clone = todist.module_clone(model, by=by)
    clone(torch.zeros(1, 2))
    assert (model[0].calls, clone[0].calls) == (0, 1)


@pytest.mark.parametrize("by", METHODS)
def test_the_original_is_untouched(by):
    model = make_model().eval()
    before = copy.deepcopy(model.state_dict())
    clone = todist.module_clone(model, by=by, detach_buffers=True)
    clone.train()
    clone[0].bias = None
    clone.add_module("more", nn.Linear(2, 1))
    assert not model.training and not model[0].training
    assert len(model) == 4 and model[0].bias is not None
    assert list(model.state_dict()) == list(before)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_an_unknown_method_is_refused_in_one_line():
    with pytest.raises(todist.UserError, match="by='wish'") as caught:
        todist.module_clone(make_model(), by="wish")
    assert "\n" not in str(caught.value)


class Chooses(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1, bias=False)
        self.chosen = self.fast

    def fast(self, inputs):
        return self.layer(inputs)

    def forward(self, inputs):
        return self.chosen(inputs)


@pytest.mark.parametrize("by", ["reference", "clone"])
def test_a_method_kept_as_an_attribute_is_the_clones(by):
    module = nn.Sequential(Chooses())
    clone = todist.module_clone(module, by=by)
    clone[0].layer._parameters["weight"] = torch.full((1, 2), 100.0)
    assert clone(torch.ones(1, 2)).item() == 200.0
    assert module[0].chosen.__self__ is module[0]


@pytest.mark.parametrize("by", METHODS)
def test_a_compiled_clone_computes_with_its_own_tensors(by):
    layer = nn.Linear(2, 1, bias=False)
    clone = todist.module_clone(nn.Sequential(torch.compile(layer, backend="eager")), by=by)
    (name,) = dict(clone.named_parameters())
    assert name == "0._orig_mod.weight"
    clone.get_submodule("0._orig_mod")._parameters["weight"] = torch.full((1, 2), 100.0)
    assert clone(torch.ones(1, 2)).item() == 200.0
    assert layer(torch.ones(1, 2)).item() != 200.0
    layer.compile(backend="eager")
    clone = todist.module_clone(layer, by=by)
    clone._parameters["weight"] = torch.full((1, 2), 100.0)
    assert clone(torch.ones(1, 2)).item() == 200.0


class Listed(nn.Module):
    """Runs its submodules from containers that are not modules."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.stages = [self.first, (self.norm, {"last": self.last})]
        self.kept = [1, "two", None]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        first, (norm, named) = self.stages
        return named["last"](norm(first(inputs)))


@pytest.mark.parametrize("by", METHODS)
def test_submodules_in_plain_containers_are_those_of_the_clone(by):
    torch.manual_seed(0)
    model = Listed().double()
    clone = todist.module_clone(model, by=by, detach_buffers=True)
    assert clone.stages[0] is clone.first and clone.stages[1][1]["last"] is clone.last
    assert model.stages[0] is model.first and clone.kept == model.kept
    mean = model.norm.running_mean.clone()
    gradients = torch.autograd.grad(clone(make_batch()).square().sum(), list(clone.parameters()))
    assert all(each.abs().sum() > 1e-12 for each in (gradients[0], gradients[-1]))
    assert torch.equal(model.norm.running_mean, mean)
    assert not torch.equal(clone.norm.running_mean, mean)


class Refusing(nn.Linear):
    """Cannot be pickled as a whole, though each of its attributes can be."""

    def __reduce__(self) -> tuple:
        raise ValueError("no")


def test_the_part_of_a_module_that_cannot_be_pickled_is_named():
    model = nn.Sequential(Listed(), nn.ReLU())
    model[1].register_forward_hook(model[0].norm.forward)  # a method of another submodule
    model.model_itself = [model]
    assert unpicklable_part(model) == ""
    model[0].norm.lock = [threading.Lock()]
    assert unpicklable_part(model).startswith("0.norm.lock: cannot pickle")
    assert unpicklable_part(model[0].norm).startswith("lock: cannot pickle")
    del model[0].norm.lock
    model.append(Refusing(2, 2))
    assert unpicklable_part(model) == "2: no"
    assert unpicklable_part(model[2]) == "Refusing: no"
