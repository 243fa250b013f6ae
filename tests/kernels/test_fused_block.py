"""The fused block against PyTorch's four operations, per task, up to the second derivative."""

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call

from metadist.kernels import fused_block, library
from metadist.models import Conv4
from metadist.models.batched_layers import Conv2d, conv_block


@pytest.fixture(autouse=True)
def no_minimum_size(monkeypatch):
    if library("fused_block") is None:
        pytest.skip("there is no C++ compiler")
    monkeypatch.setattr(fused_block, "MIN_BYTES", 0)


class Block(nn.Module):
    def __init__(self, before, after, native):
        super().__init__()
        self.convolution = Conv2d(before, after, 3, padding=1, native=native)
        self.norm = nn.BatchNorm2d(after, 0.1, track_running_stats=False)
        self.native = native

    def forward(self, images):
        return conv_block(self.convolution, self.norm, images, True, self.native)


class Plain(nn.Sequential):
    def __init__(self, before, after):
        super().__init__()
        self.convolution = nn.Conv2d(before, after, 3, padding=1)
        self.norm = nn.BatchNorm2d(after, 0.1, track_running_stats=False)
        self.relu, self.pool = nn.ReLU(), nn.MaxPool2d(2)


def derivatives(value, parameters, twice):
    generator = torch.Generator().manual_seed(3)

    def direction(like):
        return torch.randn(like.shape, dtype=like.dtype, generator=generator)

    upstream = direction(value).requires_grad_()
    first = torch.autograd.grad(value, parameters, upstream, create_graph=twice)
    if not twice:
        return first
    projected = sum((each * direction(each)).sum() for each in first)
    second = torch.autograd.grad(projected, [*parameters, upstream], materialize_grads=True)
    return *first, *second


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("size", [(28, 28), (6, 9), (5, 4), (7, 3), (2, 2)], ids=str)
@pytest.mark.parametrize("channels", [(1, 16), (3, 32)], ids=str)
def test_fused_block_equals_pytorch(channels, size, twice):
    torch.manual_seed(0)
    tasks, images = 2, torch.randn(2, 3, channels[0], *size, dtype=torch.float64)
    ours, plain = Block(*channels, native=True).double(), Plain(*channels).double()
    parameters = {
        name: (each.detach() + 0.3 * torch.randn(tasks, *each.shape)).requires_grad_()
        for name, each in plain.named_parameters()
    }
    result = functional_call(ours, parameters, (images,))
    task_parameters = [
        {name: each[task] for name, each in parameters.items()} for task in range(tasks)
    ]
    expected = torch.stack(
        [functional_call(plain, p, (images[task],)) for task, p in enumerate(task_parameters)]
    )
    torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-10)
    wrt = [*parameters.values()]
    pairs = (derivatives(value, wrt, twice) for value in (result, expected))
    for actual, wanted in zip(*pairs, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-9, atol=1e-9)
    for task in range(tasks):
        unbatched = functional_call(ours, task_parameters[task], (images[task],))
        assert torch.equal(unbatched, result[task])


def test_when_conv4_uses_the_fused_block(monkeypatch):
    calls = []
    monkeypatch.setattr(fused_block, "MIN_BYTES", 16 * 28 * 28 * 16 * 4)
    monkeypatch.setattr(fused_block, "call", lambda *args: calls.append(args[1]))
    model = Conv4((1, 28, 28), 5, filters=16, pooling="max")
    with torch.no_grad():
        model(torch.zeros(15, 1, 28, 28))
        assert not calls  # the feature maps fit into the cache
        model(torch.zeros(16, 1, 28, 28))
        assert calls == ["forward"]
        model(torch.zeros(16, 1, 28, 28, requires_grad=True))  # gradient by the images
        Conv4((1, 28, 28), 5, filters=16, pooling="stride")(torch.zeros(64, 1, 28, 28))
        Conv4((1, 28, 28), 5, filters=16, pooling="max", native=False)(torch.zeros(64, 1, 28, 28))
        running = Conv4((1, 28, 28), 5, 16, "max", running_statistics=True)
        running.eval()(torch.zeros(64, 1, 28, 28))
    assert calls == ["forward"]


def test_running_statistics_are_those_of_pytorch():
    """Of a model without kernels."""
    images = torch.rand(16, 1, 28, 28).double()
    fused = Conv4((1, 28, 28), 5, 16, "max", running_statistics=True).double()
    plain = Conv4((1, 28, 28), 5, 16, "max", running_statistics=True, native=False).double()
    plain.load_state_dict(fused.state_dict())
    for model in (fused, plain):
        model(images).square().sum().backward()  # the first block once more, for double backward
        (first,) = torch.autograd.grad(model(images).sum(), model.head.weight, create_graph=True)
        first.sum().backward()
    for found, expected in zip(fused.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("frozen", ["convolution.weight", "convolution.bias", "norm.weight"])
def test_parameters_may_be_frozen(frozen):
    torch.manual_seed(0)
    blocks = [Block(1, 16, native) for native in (True, False)]
    blocks[1].load_state_dict(blocks[0].state_dict())
    images = torch.randn(3, 1, 8, 8)
    gradients = []
    for each in blocks:
        each.get_parameter(frozen).requires_grad_(False)
        wrt = [part for part in each.parameters() if part.requires_grad]
        value = each(images).square().sum()
        gradients.append(torch.autograd.grad(value, wrt, create_graph=True))
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("tasks", [(), (2,)])
@pytest.mark.parametrize("bias_of", [lambda weight: weight, lambda weight: 0.5 * weight])
def test_a_parameter_may_be_another_one_or_computed_from_it(bias_of, tasks):
    torch.manual_seed(0)
    images = torch.randn(*tasks, 3, 1, 8, 8, dtype=torch.float64)
    values = torch.rand(*tasks, 16, dtype=torch.float64, requires_grad=True)
    block = Block(1, 16, native=True).double()
    parameters = {n: p.detach().expand(*tasks, *p.shape) for n, p in block.named_parameters()}
    gradients = []
    for block.native in (True, False):
        parameters["norm.weight"] = 2 * values
        parameters["norm.bias"] = bias_of(parameters["norm.weight"])
        loss = functional_call(block, parameters, images).square().sum()
        (first,) = torch.autograd.grad(loss, values, create_graph=True)
        gradients.append((first, *torch.autograd.grad(first.square().sum(), values)))
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-9)


def test_a_gradient_with_a_tangent_is_refused_as_by_the_convolution():
    outputs = Block(1, 16, native=True)(torch.randn(3, 1, 8, 8))
    with forward_ad.dual_level():
        gradient = forward_ad.make_dual(torch.ones_like(outputs), torch.ones_like(outputs))
        with pytest.raises(RuntimeError, match=r"forward mode AD|jvp"):
            outputs.backward(gradient)


def test_mismatched_channels_raise_pytorchs_error():
    module = Block(1, 16, True)
    module.norm = nn.BatchNorm2d(32, track_running_stats=False)
    with pytest.raises(RuntimeError):
        module(torch.randn(3, 1, 8, 8))


def test_blocks_that_cannot_be_fused_are_pytorchs():
    with pytest.raises(RuntimeError, match="too small"):
        Block(1, 16, True)(torch.randn(3, 1, 1, 8))  # nothing is left by pooling
    blocks = [Block(1, 16, native) for native in (True, False)]
    blocks[1].load_state_dict(blocks[0].state_dict())
    images = torch.randn(3, 1, 8, 8)
    for stride, bias in ((2, blocks[0].convolution.bias), (1, None)):
        for each in blocks:
            each.convolution.stride, each.convolution.bias = (stride, stride), bias
        torch.testing.assert_close(blocks[0](images), blocks[1](images), rtol=1e-4, atol=1e-5)
