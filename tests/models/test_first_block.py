"""The first block as one operation against PyTorch's four, task by task, twice differentiated."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

from metadist.kernels import library
from metadist.models import Conv4, first_block
from metadist.models.block import block
from metadist.models.layers import Conv2d

pytestmark = pytest.mark.usefixtures("single_thread")


@pytest.fixture(autouse=True)
def small_ones_too(monkeypatch):
    if library("first_block") is None:
        pytest.skip("there is no C++ compiler")
    monkeypatch.setattr(first_block, "_BYTES", 0)


class Block(nn.Module):
    def __init__(self, before, after, native):
        super().__init__()
        self.convolution = Conv2d(before, after, 3, padding=1, native=native)
        self.norm = nn.BatchNorm2d(after, track_running_stats=False)
        self.native = native

    def forward(self, images):
        return block(self.convolution, self.norm, images, True, self.native)


class Plain(nn.Sequential):
    def __init__(self, before, after):
        super().__init__()
        self.convolution = nn.Conv2d(before, after, 3, padding=1)
        self.norm = nn.BatchNorm2d(after, track_running_stats=False)
        self.relu, self.pool = nn.ReLU(), nn.MaxPool2d(2)


def derivatives(value, parameters, twice):
    generator = torch.Generator().manual_seed(3)

    def direction(like):
        return torch.randn(like.shape, dtype=like.dtype, generator=generator)

    upward = direction(value).requires_grad_()
    first = torch.autograd.grad(value, parameters, upward, create_graph=twice)
    if not twice:
        return first
    along = sum((each * direction(each)).sum() for each in first)
    second = torch.autograd.grad(along, [*parameters, upward], materialize_grads=True)
    return *first, *second


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("size", [(28, 28), (6, 9), (5, 4), (7, 3), (2, 2)], ids=str)
@pytest.mark.parametrize("channels", [(1, 16), (3, 32)], ids=str)
def test_it_equals_pytorchs_operations(channels, size, twice):
    torch.manual_seed(0)
    tasks, images = 2, torch.randn(2, 3, channels[0], *size, dtype=torch.float64)
    ours, plain = Block(*channels, native=True).double(), Plain(*channels).double()
    parameters = {
        name: (each.detach() + 0.3 * torch.randn(tasks, *each.shape)).requires_grad_()
        for name, each in plain.named_parameters()
    }
    found = functional_call(ours, parameters, (images,))
    own = [{name: each[task] for name, each in parameters.items()} for task in range(tasks)]
    each = [functional_call(plain, p, (images[task],)) for task, p in enumerate(own)]
    expected = torch.stack(each)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    asked = [*parameters.values()]
    pairs = (derivatives(value, asked, twice) for value in (found, expected))
    for mine, theirs in zip(*pairs, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)
    for task in range(tasks):
        alone = functional_call(ours, own[task], (images[task],))
        assert torch.equal(alone, found[task])


def test_when_the_network_takes_it(monkeypatch):
    taken = []
    monkeypatch.setattr(first_block, "_BYTES", 16 * 28 * 28 * 16 * 4)
    monkeypatch.setattr(first_block, "call", lambda *given: taken.append(given[1]))
    model = Conv4((1, 28, 28), 5, filters=16, pooling="max")
    with torch.no_grad():
        model(torch.zeros(15, 1, 28, 28))
        assert not taken  # so few that the cache holds their maps
        model(torch.zeros(16, 1, 28, 28))
        assert taken == ["forward"]
        model(torch.zeros(16, 1, 28, 28, requires_grad=True))  # asks for the images' gradient
        Conv4((1, 28, 28), 5, filters=16, pooling="stride")(torch.zeros(64, 1, 28, 28))
        Conv4((1, 28, 28), 5, filters=16, pooling="max", native=False)(torch.zeros(64, 1, 28, 28))
        gathering = Conv4((1, 28, 28), 5, 16, "max", running_statistics=True)
        gathering(torch.zeros(64, 1, 28, 28))
    assert taken == ["forward"]


@pytest.mark.parametrize("frozen", ["convolution.weight", "convolution.bias", "norm.weight"])
def test_parameters_may_be_frozen(frozen):
    torch.manual_seed(0)
    blocks = [Block(1, 16, native) for native in (True, False)]
    blocks[1].load_state_dict(blocks[0].state_dict())
    images = torch.randn(3, 1, 8, 8)
    found = []
    for each in blocks:
        each.get_parameter(frozen).requires_grad_(False)
        asked = [part for part in each.parameters() if part.requires_grad]
        value = each(images).square().sum()
        found.append(torch.autograd.grad(value, asked, create_graph=True))
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)


def test_a_norm_of_other_channels_is_left_to_pytorch():
    unlike = Block(1, 16, True)
    unlike.norm = nn.BatchNorm2d(32, track_running_stats=False)
    with pytest.raises(RuntimeError):
        unlike(torch.randn(3, 1, 8, 8))
