"""The convolution in C++ against PyTorch's, task by task, up to the second derivative."""

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call

from metadist.kernels import library
from metadist.models.convolution import can_convolve, convolve
from metadist.models.layers import Conv2d

pytestmark = pytest.mark.usefixtures("single_thread")

SIZES = [(14, 14), (7, 7), (28, 5), (3, 2), (1, 1)]
CHANNELS = [(1, 16), (3, 32), (16, 16), (32, 80)]


@pytest.fixture(autouse=True)
def compiled():
    if library("winograd") is None or library("few_channels") is None:
        pytest.skip("there is no C++ compiler")


def numbers(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def derivatives(function, inputs, asked):
    """The value, its gradients by `asked`, and theirs, in directions that are always the same."""
    generator = torch.Generator().manual_seed(3)

    def direction(like):
        return torch.randn(like.shape, dtype=like.dtype, generator=generator)

    value = function(*inputs)
    upward = direction(value).requires_grad_()
    first = torch.autograd.grad(value, asked, upward, create_graph=True)
    along = sum((each * direction(each)).sum() for each in first)
    second = torch.autograd.grad(along, [*asked, upward], materialize_grads=True)
    return [value, *first, *second]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(("before", "after"), CHANNELS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_values_and_two_derivatives(before, after, size, dtype):
    torch.manual_seed(0)
    tasks, n = 3, 2
    maps = numbers(tasks, n, before, *size, dtype=dtype)
    weight, bias = (
        numbers(tasks, after, before, 3, 3, dtype=dtype),
        numbers(tasks, after, dtype=dtype),
    )
    few = before < 16
    asked = [weight, bias] if few else [maps, weight, bias]
    given = maps.detach() if few else maps

    def ours(maps, weight, bias):
        outputs = convolve(maps.permute(0, 1, 3, 4, 2), weight, bias)
        return outputs.permute(0, 1, 4, 2, 3)

    def torchs(maps, weight, bias):
        each = zip(maps, weight, bias, strict=True)
        return torch.stack([F.conv2d(m, w, b, padding=1) for m, w, b in each])

    found = derivatives(ours, (given, weight, bias), asked)
    expected = derivatives(torchs, (given, weight, bias), asked)
    near = 1e-12 if dtype == torch.float64 else 3e-5
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=near * theirs.abs().max().item())


def test_it_can_be_differentiated_as_often_as_one_likes():
    torch.manual_seed(0)
    maps, weight = numbers(1, 2, 5, 4, 16), numbers(1, 16, 16, 3, 3)

    def fourth(convolution):
        value = convolution(maps, weight).tanh().sum()  # curved, so that no derivative is zero
        for asked in (maps, weight, maps, weight):
            value = torch.autograd.grad(value, asked, create_graph=True)[0].square().sum()
        return value

    def torchs(maps, weight):
        return F.conv2d(maps[0].permute(0, 3, 1, 2), weight[0], padding=1)

    expected = fourth(torchs)
    torch.testing.assert_close(
        fourth(lambda *given: convolve(*given, None)), expected, rtol=1e-9, atol=0
    )


def test_the_layer_alone_and_side_by_side_gives_the_same_bits():
    torch.manual_seed(0)
    layer = Conv2d(16, 32, 3, padding=1)
    maps = torch.randn(3, 4, 16, 9, 6)
    weight, bias = torch.randn(3, 32, 16, 3, 3), torch.randn(3, 32)
    together = functional_call(layer, {"weight": weight, "bias": bias}, (maps,))
    for task in range(3):
        alone = functional_call(layer, {"weight": weight[task], "bias": bias[task]}, (maps[task],))
        assert torch.equal(alone, together[task])


def test_what_it_does_is_told_from_what_it_does_not(monkeypatch):
    layer, maps = Conv2d(16, 16, 3, padding=1), torch.zeros(1, 16, 4, 4)
    assert can_convolve(layer, maps)
    others = [
        Conv2d(16, 16, 3, padding=1, stride=2),
        Conv2d(16, 16, 3),
        Conv2d(16, 16, 5, padding=1),
        Conv2d(16, 10, 3, padding=1),  # outputs that fill no vectors
    ]
    assert not any(can_convolve(other, maps) for other in others)
    assert not can_convolve(layer, maps.double())
    assert not can_convolve(Conv2d(16, 16, 3, padding=1, device="meta"), maps)
    assert not can_convolve(Conv2d(12, 16, 3, padding=1), torch.zeros(1, 12, 4, 4))
    assert can_convolve(Conv2d(1, 16, 3, padding=1), torch.zeros(1, 1, 4, 4))
    assert not can_convolve(
        Conv2d(1, 16, 3, padding=1), torch.zeros(1, 1, 4, 4, requires_grad=True)
    )
    torch.set_num_threads(2)
    assert not can_convolve(layer, maps)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (Conv2d(16, 16, 3, padding=1), (2, 32, 8, 8)),
        (Conv2d(3, 16, 3, padding=1), (2, 1, 8, 8)),
        (Conv2d(16, 16, 3, padding=1, dtype=torch.float64), (2, 16, 8, 8)),
    ],
    ids=["channels", "few channels", "type"],
)
def test_what_does_not_fit_together_is_left_to_pytorch(layer, shape):
    assert not can_convolve(layer, torch.zeros(shape))
    with pytest.raises(RuntimeError):
        layer(torch.zeros(shape))


def test_tasks_of_weights_and_maps_must_be_as_many():
    layer, maps = Conv2d(16, 16, 3, padding=1), torch.zeros(3, 2, 16, 4, 4)
    parameters = {"weight": torch.zeros(2, 16, 16, 3, 3), "bias": torch.zeros(2, 16)}
    with pytest.raises(RuntimeError):
        functional_call(layer, parameters, (maps,))
