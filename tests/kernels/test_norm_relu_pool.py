"""Norm, ReLU and pooling against PyTorch and elementary operations, with their derivatives."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.func import functional_call, grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from metadist.kernels import fused_block, library
from metadist.kernels.loader import backend
from metadist.kernels.norm_relu_pool import norm_backend
from metadist.models import Conv4
from metadist.models.batched_layers import Conv2d, conv_block, norm_relu

needs_compiler = pytest.mark.skipif(
    library("norm_relu_pool") is None, reason="there is no C++ compiler"
)


def norm(channels):
    return nn.BatchNorm2d(channels, track_running_stats=False)


class Fused(nn.Module):
    def __init__(self, pool):
        super().__init__()
        self.norm, self.pool = norm(16), pool

    def forward(self, inputs):
        window = 2 if self.pool else 1
        assert norm_backend(inputs, self.norm.weight, self.norm.bias, window, True) == "cpp"
        return norm_relu(self.norm, inputs, self.pool)


def results(module, inputs, parameters):
    """Value, derivative, and the derivative of a function of the derivative."""
    tensors = [each.clone().requires_grad_() for each in [inputs, *parameters]]
    names = [name for name, _ in module.named_parameters()]
    out = functional_call(module, dict(zip(names, tensors[1:], strict=True)), (tensors[0],))
    first = torch.autograd.grad(out.tanh().sum(), tensors, create_graph=True)
    scalar = sum((g.sin() * g).sum() for g in first)
    return [out, *first, *torch.autograd.grad(scalar, tensors)]


@needs_compiler
@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize("size", [(4, 4), (7, 5), (1, 9), (12, 13)])
@pytest.mark.parametrize("last", [False, True], ids=["channels first", "channels last"])
def test_fused_equals_pytorch(pool, size, last):
    if pool and min(size) < 2:
        size = (2, 9)
    generator = torch.Generator().manual_seed(sum(size))

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    inputs, weight, bias = 3 * random(6, 16, *size) + 1, random(16), random(16)
    if last:
        inputs = inputs.to(memory_format=torch.channels_last)
    reference = nn.Sequential(norm(16), nn.ReLU(), *([nn.MaxPool2d(2)] if pool else []))
    unbatched = results(Fused(pool), inputs, [weight, bias])
    expected = results(reference, inputs, [weight, bias])
    for got, known in zip(unbatched, expected, strict=True):
        assert torch.allclose(got, known, rtol=1e-10, atol=1e-11)
    # Two batched tasks, the second with other parameters.
    batched = results(
        Fused(pool),
        torch.stack([inputs, 2 * inputs - 1]),
        [torch.stack([p, -p]) for p in (weight, bias)],
    )
    second_task = results(reference, 2 * inputs - 1, [-weight, -bias])
    for got, first, second in zip(batched, unbatched, second_task, strict=True):
        assert torch.equal(got[0], first)
        assert torch.allclose(got[1], second, rtol=1e-10, atol=1e-11)


@needs_compiler
@pytest.mark.parametrize("tasks", [None, 3])
@pytest.mark.parametrize("size", [(), (10,), (5, 2)])
def test_inputs_of_any_dimension(tasks, size):
    kind = nn.BatchNorm2d if len(size) == 2 else nn.BatchNorm1d
    module = kind(16, track_running_stats=False)
    inputs = torch.randn(*([] if tasks is None else [tasks]), 4, 16, *size)
    if tasks:
        module.weight, module.bias = (nn.Parameter(torch.randn(tasks, 16)) for _ in range(2))
    assert norm_backend(inputs, module.weight, module.bias, 1, True) == "cpp"
    found, expected = (norm_relu(module, inputs, native=native) for native in (True, False))
    assert found.shape == inputs.shape
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("native", [True, False])
def test_only_height_and_width_are_pooled(native):
    module = nn.BatchNorm1d(16, track_running_stats=False)
    with pytest.raises((ValueError, IndexError)):
        norm_relu(module, torch.randn(4, 16, 10), True, native)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("tasks", [None, 3])
def test_one_value_per_channel_is_refused(native, tasks):
    inputs = torch.randn(*([] if tasks is None else [tasks]), 1, 16, 1, 1)
    module = norm(16)
    if tasks:
        module.weight, module.bias = (nn.Parameter(torch.ones(tasks, 16)) for _ in range(2))
    with pytest.raises(ValueError, match=r"more than (one|1) value"):
        norm_relu(module, inputs, native=native)


@needs_compiler
def test_float32_error_is_comparable_to_pytorchs():
    inputs = 5 + torch.randn(20, 16, 14, 14, generator=torch.Generator().manual_seed(0))
    exact = F.max_pool2d(F.relu(norm(16).double()(inputs.double())), 2)
    reference = F.max_pool2d(F.relu(norm(16)(inputs)), 2)
    ours = Fused(pool=True)(inputs)
    assert (ours - exact).abs().max() <= 2 * (reference - exact).abs().max()


@needs_compiler
@pytest.mark.parametrize("eps", [0.5, 1])
def test_eps_is_used(eps):
    inputs = torch.randn(6, 16, 4, 4, dtype=torch.float64)
    module = nn.BatchNorm2d(16, eps=eps, track_running_stats=False).double()
    torch.testing.assert_close(norm_relu(module, inputs), F.relu(module(inputs)))


@needs_compiler
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_values_propagate(value):
    inputs = torch.randn(4, 16, 4, 4)
    inputs[1, 3, 2, 2] = value
    out = Fused(pool=True)(inputs)
    assert out[:, 3].isnan().all()
    assert out[:, :3].isfinite().all() and out[:, 4:].isfinite().all()


def test_backends_of_norms():
    def found(inputs, weight, bias=None, window=1, native=True):
        return norm_backend(inputs, weight, weight if bias is None else bias, window, native)

    inputs, ones = torch.randn(4, 16, 4, 4), torch.ones(16)
    many = torch.randn(64, 16, 8, 8)
    assert found(inputs, ones) == found(many, ones, window=2) == "cpp"
    assert found(many, ones, native=False) == norm_backend(many, ones, None, 1, True) == "torch"
    assert found(many[:, :15], ones[:15]) == "torch"
    for few in (
        found(inputs, ones, native=False),
        found(inputs[:, :15], ones[:15]),
        found(inputs[:, :15], ones),
        found(inputs, ones, ones[:4]),
        found(inputs.half(), ones.half()),
        found(inputs, ones.double()),
        found(inputs, ones, ones.double()),
        found(inputs[:1, :, :1, :1], ones),
        found(inputs[..., :1], ones, window=2),
    ):
        assert few is None
    torch.set_num_threads(2)
    assert found(inputs, ones) is None and found(many, ones) == "torch"


def test_a_model_works_under_torch_func():
    model = Conv4((1, 16, 16), 3, filters=16, pooling="max")
    parameters = {name: each.detach() for name, each in model.named_parameters()}
    images = torch.rand(2, 4, 1, 16, 16)

    def loss(parameters, images):
        return functional_call(model, parameters, (images,)).square().sum()

    found = vmap(grad(loss), (None, 0))(parameters, images)
    for task in range(2):
        model.zero_grad()
        loss(dict(model.named_parameters()), images[task]).backward()
        for name, parameter in model.named_parameters():
            assert torch.allclose(found[name][task], parameter.grad, rtol=1e-3, atol=1e-4)


def elementary_block(convolution, layer, images, pool):
    """A block in operations that have derivatives of any order, for (tasks, n, channels, h, w)."""
    weights = zip(images, convolution.weight, convolution.bias, strict=True)
    features = torch.stack([F.conv2d(*each, padding=1) for each in weights])
    mean = features.mean((1, 3, 4), keepdim=True)
    variance = (features - mean).square().mean((1, 3, 4), keepdim=True)
    weight, bias = (each[:, None, :, None, None] for each in (layer.weight, layer.bias))
    out = (weight * (features - mean) / (variance + layer.eps).sqrt() + bias).relu()
    return torch.stack([F.max_pool2d(each, 2) for each in out]) if pool else out


@pytest.mark.parametrize("channels", [3, 16])
@pytest.mark.parametrize("pool", [True, False])
@pytest.mark.parametrize("constant", ["nothing", "images", "convolution", "norm"])
def test_derivatives_up_to_the_fourth(channels, pool, constant, monkeypatch):
    monkeypatch.setattr(fused_block, "MIN_BYTES", 0)
    torch.manual_seed(0)
    tasks, before, after = 2, Conv2d(1, channels, 3, padding=1), norm(channels)
    before.weight = nn.Parameter(torch.rand(tasks, channels, 1, 3, 3).double())
    vectors = (nn.Parameter(torch.rand(tasks, channels).double()) for _ in range(3))
    before.bias, after.weight, after.bias = vectors
    images = torch.rand(tasks, 4, 1, 6, 5).double().requires_grad_()
    inputs = {
        "images": [images],
        "convolution": [before.weight, before.bias],
        "norm": [after.weight, after.bias],
    }
    for tensor in inputs.pop(constant, []):
        tensor.requires_grad_(False)
    variables = list(itertools.chain(*inputs.values()))

    def orders(outputs):
        """The derivatives of the first order and on, each of a function of those before it."""
        found = [outputs]
        for _ in range(4):
            scalar = sum(
                (torch.linspace(-1, 1, each.numel()).view_as(each) * each.square()).mean()
                for each in found[-len(variables) :]
            )
            found += torch.autograd.grad(scalar, variables, create_graph=True)
        return found

    expected = orders(elementary_block(before, after, images, pool))
    torch.testing.assert_close(orders(conv_block(before, after, images, pool)), expected)


def test_mismatches_raise_pytorchs_error():
    with pytest.raises(RuntimeError):
        norm_relu(nn.BatchNorm2d(16, track_running_stats=False), torch.zeros(2, 32, 4, 4))
    with pytest.raises(RuntimeError):
        norm_relu(nn.BatchNorm2d(16, track_running_stats=False), torch.zeros(2, 16, 1, 4), True)


class Constant(nn.BatchNorm2d):
    """A norm of the user's own."""

    def forward(self, inputs):
        return super().forward(inputs) * 0 + 7


@needs_compiler
def test_norms_of_the_users_own_and_their_hooks_are_run():
    inputs = torch.randn(4, 16, 6, 6)
    own = Constant(16, track_running_stats=False)
    assert torch.equal(norm_relu(own, inputs), torch.full_like(inputs, 7))
    hooked, seen = norm(16), []
    hooked.register_forward_hook(lambda *_: seen.append(1))
    norm_relu(hooked, inputs)
    assert seen == [1]


@needs_compiler
def test_hooks_of_the_first_block_are_run_for_many_images():
    model, calls = Conv4((1, 28, 28), 5, filters=64, pooling="max"), []
    images = torch.randn(128, 1, 28, 28)
    for layer in (model.convolutions[0], model.norms[0]):
        layer.register_forward_hook(lambda *_: calls.append(1))
    model(images)
    assert len(calls) == 2


@needs_compiler
@pytest.mark.parametrize(
    ("weight", "bias", "shape"),
    [
        ((16,), (4,), (4, 16, 6, 6)),
        ((3, 16), (16,), (3, 4, 16, 6, 6)),
        ((16,), (16,), (4, 16)),
    ],
)
def test_shapes_that_do_not_fit_are_left_to_pytorch(weight, bias, shape):
    parameters = {"norm.weight": torch.ones(weight), "norm.bias": torch.zeros(bias)}

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = norm(16)

        def forward(self, inputs):
            return norm_relu(self.norm, inputs)

    with pytest.raises((RuntimeError, ValueError)):
        functional_call(Layer(), parameters, (torch.randn(shape),))


@needs_compiler
def test_dispatch_modes_see_pytorchs_operations():
    model, images = Conv4((1, 28, 28), 5, pooling="max"), torch.randn(4, 1, 28, 28)
    assert backend(images) == "cpp"
    with FlopCounterMode(display=False) as counted:
        model(images)
    position = 2 * 4 * 64 * 9  # products and sums for 4 images and 64 filters of 3×3
    convolutions = position * (28**2 + 64 * (14**2 + 7**2 + 3**2))
    assert counted.get_total_flops() == convolutions + 2 * 4 * 64 * 5
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert model(torch.randn(4, 1, 28, 28)).shape == (4, 5)
    traced = make_fx(model)(images)
    more = torch.randn(4, 1, 28, 28)
    torch.testing.assert_close(traced(more), model(more))


@needs_compiler
def test_operations_before_autograd_can_be_recorded():
    model, images = Conv4((1, 28, 28), 5, filters=16, pooling="max"), torch.randn(4, 1, 28, 28)
    recorded = make_fx(model, pre_dispatch=True)(images)
    torch.testing.assert_close(recorded(images), model(images))
