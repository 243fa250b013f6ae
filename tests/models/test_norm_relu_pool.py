"""Norm, ReLU and pooling in C++ against PyTorch's own, up to the second derivative."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap

from metadist.kernels import library
from metadist.models import Conv4
from metadist.models.norm_relu import norm_relu
from metadist.models.norm_relu_pool import can_fuse

needs_compiler = pytest.mark.skipif(
    library("norm_relu_pool") is None, reason="there is no C++ compiler"
)


def norm(channels):
    return nn.BatchNorm2d(channels, track_running_stats=False)


class Fused(nn.Module):
    def __init__(self, pool):
        super().__init__()
        self.norm, self.pool = norm(16), pool

    def forward(self, maps):
        assert can_fuse(self.norm, maps)
        return norm_relu(self.norm, maps, self.pool)


def results(module, maps, parameters):
    """Value, derivative, and the derivative of a function of the derivative."""
    leaves = [leaf.clone().requires_grad_() for leaf in [maps, *parameters]]
    names = [name for name, _ in module.named_parameters()]
    out = functional_call(module, dict(zip(names, leaves[1:], strict=True)), (leaves[0],))
    first = torch.autograd.grad(out.tanh().sum(), leaves, create_graph=True)
    scalar = sum((g.sin() * g).sum() for g in first)
    return [out, *first, *torch.autograd.grad(scalar, leaves)]


@needs_compiler
@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize("size", [(4, 4), (7, 5), (1, 9), (12, 13)])
@pytest.mark.parametrize("last", [False, True], ids=["channels first", "channels last"])
def test_fused_equals_pytorch(pool, size, last, single_thread):
    if pool and min(size) < 2:
        size = (2, 9)
    generator = torch.Generator().manual_seed(sum(size))

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    maps, weight, bias = 3 * random(6, 16, *size) + 1, random(16), random(16)
    if last:
        maps = maps.to(memory_format=torch.channels_last)
    theirs = nn.Sequential(norm(16), nn.ReLU(), *([nn.MaxPool2d(2)] if pool else []))
    alone = results(Fused(pool), maps, [weight, bias])
    expected = results(theirs, maps, [weight, bias])
    for got, known in zip(alone, expected, strict=True):
        assert torch.allclose(got, known, rtol=1e-10, atol=1e-11)
    # Two tasks side by side, the second with other parameters.
    together = results(
        Fused(pool),
        torch.stack([maps, 2 * maps - 1]),
        [torch.stack([p, -p]) for p in (weight, bias)],
    )
    beside = results(theirs, 2 * maps - 1, [-weight, -bias])
    for got, first, second in zip(together, alone, beside, strict=True):
        assert torch.equal(got[0], first)
        assert torch.allclose(got[1], second, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("tasks", [None, 3])
def test_one_value_a_channel_is_refused(native, tasks, single_thread):
    maps = torch.randn(*([] if tasks is None else [tasks]), 1, 16, 1, 1)
    module = norm(16)
    if tasks:
        module.weight, module.bias = (nn.Parameter(torch.ones(tasks, 16)) for _ in range(2))
    with pytest.raises(ValueError, match=r"more than (one|1) value"):
        norm_relu(module, maps, native=native)


def test_a_norm_without_weights(single_thread):
    plain, maps = (
        nn.BatchNorm2d(16, affine=False, track_running_stats=False),
        torch.randn(2, 16, 3, 3),
    )
    assert torch.equal(norm_relu(plain, maps), F.relu(plain(maps)))


@needs_compiler
def test_single_precision_is_as_good_as_pytorchs(single_thread):
    maps = 5 + torch.randn(20, 16, 14, 14, generator=torch.Generator().manual_seed(0))
    exact = F.max_pool2d(F.relu(norm(16).double()(maps.double())), 2)
    theirs = F.max_pool2d(F.relu(norm(16)(maps)), 2)
    ours = Fused(pool=True)(maps)
    assert (ours - exact).abs().max() <= 2 * (theirs - exact).abs().max()


@needs_compiler
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_does_not_get_lost(value, single_thread):
    maps = torch.randn(4, 16, 4, 4)
    maps[1, 3, 2, 2] = value
    out = Fused(pool=True)(maps)
    assert out[:, 3].isnan().all()
    assert out[:, :3].isfinite().all() and out[:, 4:].isfinite().all()


def test_what_cannot_be_fused(single_thread):
    maps = torch.randn(4, 16, 4, 4)
    assert not can_fuse(nn.Identity(), maps)
    assert not can_fuse(nn.BatchNorm2d(16), maps)
    assert not can_fuse(nn.BatchNorm2d(16, affine=False, track_running_stats=False), maps)
    assert not can_fuse(norm(15), maps[:, :15])
    assert not can_fuse(norm(16), maps.half())
    assert not can_fuse(norm(16), maps[:1, :, :1, :1])
    torch.set_num_threads(2)
    assert not can_fuse(norm(16), maps)


def test_a_model_still_goes_through_torch_func(single_thread):
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


def test_a_first_value_far_off_costs_no_precision(single_thread):
    torch.manual_seed(0)
    maps = torch.randn(20, 16, 12, 12)
    maps[0, :, 0, 0] += 300.0
    norm = nn.BatchNorm2d(16, track_running_stats=False)
    exact = norm_relu(norm.double(), maps.double())
    torch.testing.assert_close(norm_relu(norm.float(), maps).double(), exact, rtol=3e-5, atol=1e-5)


def test_other_numbers_of_channels_are_left_to_pytorch(single_thread):
    with pytest.raises(RuntimeError):
        norm_relu(nn.BatchNorm2d(16, track_running_stats=False), torch.zeros(2, 32, 4, 4))
    with pytest.raises(RuntimeError):
        norm_relu(nn.BatchNorm2d(16, track_running_stats=False), torch.zeros(2, 16, 1, 4), True)
