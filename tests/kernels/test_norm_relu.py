"""Norm and ReLU, in C++ and in PyTorch, against PyTorch's layers, with their derivatives."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.autograd.functional import hessian, hvp, jacobian
from torch.func import vmap

from metadist.kernels import norm_relu_pool
from metadist.models import batched_layers
from metadist.models.batched_layers import norm_relu


def norm(channels):
    return nn.BatchNorm2d(channels, track_running_stats=False)


def test_a_norm_without_weights():
    plain, inputs = (
        nn.BatchNorm2d(16, affine=False, track_running_stats=False),
        torch.randn(2, 16, 3, 3),
    )
    assert torch.equal(norm_relu(plain, inputs), F.relu(plain(inputs)))


def test_a_norm_without_weights_cannot_be_batched():
    norm = nn.BatchNorm1d(16, affine=False, track_running_stats=False)
    inputs = torch.randn(3, 5, 16)
    with pytest.raises(ValueError, match="use affine=True"):
        norm_relu(norm, inputs)
    assert torch.equal(norm_relu(norm, inputs[0]), F.relu(norm(inputs[0])))
    tracking = nn.BatchNorm1d(5, affine=False).eval()  # which is never batched
    assert torch.equal(norm_relu(tracking, inputs), F.relu(tracking(inputs)))


@pytest.mark.parametrize("native", [True, False])
def test_a_norm_without_bias(native):
    layer, inputs = norm(16), torch.randn(2, 16, 3, 3)
    layer.register_parameter("bias", None)  # as with `bias=False`, which PyTorch 2.9 does not have
    torch.testing.assert_close(norm_relu(layer, inputs, native=native), F.relu(layer(inputs)))


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("tracked", [True, False])
@pytest.mark.parametrize("momentum", [0.1, 0.9, None])
@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d])
def test_running_statistics_are_updated_as_in_pytorch(native, tracked, momentum, kind):
    torch.manual_seed(0)
    theirs = kind(16, momentum=momentum).double()
    theirs.track_running_stats = tracked  # the buffers remain, and are not used in training
    ours = copy.deepcopy(theirs)
    for n in (5, 2000, 2000):  # few values are left to PyTorch
        inputs = 2 + 3 * torch.randn(n, 16, *[4, 3][: 2 * (kind is nn.BatchNorm2d)]).double()
        found, expected = norm_relu(ours, inputs, native=native), F.relu(theirs(inputs))
        torch.testing.assert_close(found, expected)
    for found, expected in zip(ours.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(found, expected)
    ours.eval(), theirs.eval()
    torch.testing.assert_close(norm_relu(ours, inputs, native=native), F.relu(theirs(inputs)))


def test_an_outlier_in_the_first_row_costs_no_precision():
    torch.manual_seed(0)
    inputs = torch.randn(20, 16, 12, 12)
    inputs[0, :, 0, 0] += 300.0
    norm = nn.BatchNorm2d(16, track_running_stats=False)
    exact = norm_relu(norm.double(), inputs.double())
    torch.testing.assert_close(
        norm_relu(norm.float(), inputs).double(), exact, rtol=3e-5, atol=1e-5
    )


def weighted(function):
    """The sum of a function's values with different weights."""

    def value(inputs):
        values = function(inputs)
        return (values.sin() * torch.arange(values.numel()).view_as(values)).sum()

    return value


@pytest.fixture(params=[3, 16], ids=["in PyTorch", "in C++"])
def ours_and_pytorchs(request, monkeypatch):
    """Norm and ReLU, those of PyTorch, and inputs."""
    torch.manual_seed(0)
    for module in (norm_relu_pool, batched_layers):
        monkeypatch.setattr(module, "MIN_ELEMENTS", 0)
    channels = request.param
    layer, inputs = norm(channels).double(), torch.randn(3, channels, 2, 2).double()
    layer.weight, layer.bias = (nn.Parameter(torch.rand(channels).double()) for _ in range(2))
    return partial(norm_relu, layer), lambda each: F.relu(layer(each)), inputs


def test_batched_gradients(ours_and_pytorchs):
    """Those of `is_grads_batched`: first derivatives, of them, and second derivatives."""
    *functions, inputs = ours_and_pytorchs
    found = []
    for function in functions:
        given = inputs.clone().requires_grad_()
        first = jacobian(function, given, create_graph=True, vectorize=True)
        (second,) = torch.autograd.grad(first.sin().sum(), given)
        found.append([first, second, hessian(weighted(function), inputs, vectorize=True)])
    torch.testing.assert_close(*found)


def test_forward_mode_derivatives(ours_and_pytorchs):
    """By inputs, of a derivative by inputs, and of a derivative of what follows."""
    *functions, inputs = ours_and_pytorchs
    found = []
    for function in functions:
        given, tangent = inputs.clone().requires_grad_(), inputs.sin()
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(given, tangent)
            value = weighted(function)(dual)
            (gradient,) = torch.autograd.grad(value, dual)
            outputs = function(given)
            arriving = forward_ad.make_dual(torch.ones_like(outputs), outputs.detach().cos())
            (after,) = torch.autograd.grad(outputs, given, arriving)
            duals = [forward_ad.unpack_dual(each) for each in (value, gradient, after)]
            found.append([part for dual in duals for part in dual])
    torch.testing.assert_close(*found)


def test_torch_func(ours_and_pytorchs):
    """The transform starts before the norm or after it."""
    *functions, inputs = ours_and_pytorchs
    found = []
    for function in functions:
        given = inputs.clone().requires_grad_()
        outputs = function(given)
        vectors = torch.stack([outputs.detach().cos(), outputs.detach().sin()])
        pull = partial(torch.autograd.grad, outputs, given, retain_graph=True)
        found.append([torch.func.hessian(weighted(function))(inputs), *vmap(pull)(vectors)])
    torch.testing.assert_close(*found)


def test_hessian_vector_products(ours_and_pytorchs):
    *functions, inputs = ours_and_pytorchs
    torch.testing.assert_close(
        *(hvp(weighted(function), inputs, inputs.sin())[1] for function in functions)
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norms_of_half_precision_are_pytorchs(dtype):
    layer = nn.BatchNorm2d(16).to(dtype)
    inputs = (100 * torch.randn(16, 16, 12, 12)).to(dtype)
    expected = F.relu(copy.deepcopy(layer)(inputs))
    assert torch.equal(norm_relu(layer, inputs), expected)


@pytest.mark.parametrize("native", [True, False])
def test_few_values_before_many_have_second_derivatives(native):
    """As support and query examples: PyTorch computes the first, and keeps running statistics."""
    torch.manual_seed(0)
    ours, theirs = (nn.BatchNorm2d(16).double() for _ in range(2))
    few, many = torch.randn(2, 16, 4, 4).double(), torch.randn(64, 16, 8, 8).double()
    found = []
    for layer in (
        lambda inputs: norm_relu(ours, inputs, native=native),
        lambda i: theirs(i).relu(),
    ):
        inputs = few.clone().requires_grad_()
        support = layer(inputs).sin().sum()
        query = layer(many + inputs.sum()).cos().sum()
        (first,) = torch.autograd.grad(support, inputs, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum() + query, inputs))
    torch.testing.assert_close(*found)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())


@pytest.mark.parametrize("native", [True, False])
def test_running_variances_far_below_eps(native):
    ours, theirs = (nn.BatchNorm2d(16, eps=1.0, momentum=1.0) for _ in range(2))
    inputs = 1e-4 * torch.randn(16, 16, 12, 12)
    norm_relu(ours, inputs, native=native), theirs(inputs)
    torch.testing.assert_close(ours.running_var, theirs.running_var, rtol=1e-5, atol=0)


@pytest.mark.parametrize("channels", [3, 16])
def test_global_hooks_are_called(channels):
    seen, layer = [], norm(channels)
    hook = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
    try:
        norm_relu(layer, torch.randn(64, channels, 16, 16))
    finally:
        hook.remove()
    assert seen == [layer]
