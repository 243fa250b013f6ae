"""The C++ convolution against PyTorch's, per task, up to the second derivative."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.func import functional_call

from metadist.kernels import convolution, library
from metadist.kernels.convolution import Geometry, convolve
from metadist.models.batched_layers import Conv2d

SIZES = [(14, 14), (7, 7), (28, 5), (3, 2), (1, 1)]
CHANNELS = [(1, 16), (3, 32), (16, 16), (32, 80)]
SAME = Geometry((3, 3), (1, 1), (1, 1))
GEOMETRIES = [
    Geometry((3, 3), (2, 2), (1, 1)),
    Geometry((1, 1), (1, 1), (0, 0)),
    Geometry((2, 5), (1, 3), (0, 2)),
    Geometry((1, 1), (3, 2), (0, 0)),  # reads some of the pixels
]


@pytest.fixture(autouse=True)
def compiled():
    if None in map(library, ("winograd", "direct", "few_channels")):
        pytest.skip("there is no C++ compiler")


def numbers(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def derivatives(function, inputs, wrt):
    """Value, gradients by `wrt` and double-backward gradients, in fixed random directions."""
    generator = torch.Generator().manual_seed(3)

    def direction(like):
        return torch.randn(like.shape, dtype=like.dtype, generator=generator)

    value = function(*inputs)
    upstream = direction(value).requires_grad_()
    first = torch.autograd.grad(value, wrt, upstream, create_graph=True)
    projected = sum((each * direction(each)).sum() for each in first)
    second = torch.autograd.grad(projected, [*wrt, upstream], materialize_grads=True)
    return [value, *first, *second]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(("before", "after"), CHANNELS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_values_and_two_derivatives(before, after, size, dtype):
    check_values_and_two_derivatives(2, before, after, size, dtype, SAME)


@pytest.mark.parametrize("size", [(14, 14), (7, 7), (4, 5)], ids=str)
@pytest.mark.parametrize(("before", "after"), [(1, 16), (3, 32), (16, 16), (32, 80)])
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda each: "-".join(map(str, each)))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_other_geometries(before, after, size, geometry, dtype):
    check_values_and_two_derivatives(5, before, after, size, dtype, geometry)


@pytest.mark.parametrize("size", [(14, 16), (13, 15)], ids=str)
@pytest.mark.parametrize("stride", [(1, 1), (1, 2), (2, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("padding", [(0, 0), (0, 1), (1, 0)], ids=str)
@pytest.mark.parametrize("channels", [(16, 16), (32, 80)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_minimal_filtering(dtype, channels, padding, stride, size):
    geometry = Geometry((3, 3), stride, padding)
    check_values_and_two_derivatives(3, *channels, size, dtype, geometry)


def check_values_and_two_derivatives(n, before, after, size, dtype, geometry):
    torch.manual_seed(0)
    tasks, kernel = 3, geometry.kernel
    inputs = numbers(tasks, n, before, *size, dtype=dtype)
    weight, bias = (
        numbers(tasks, after, before, *kernel, dtype=dtype),
        numbers(tasks, after, dtype=dtype),
    )
    few = before < 16
    wrt = [weight, bias] if few else [inputs, weight, bias]
    argument = inputs.detach() if few else inputs

    def ours(inputs, weight, bias):
        outputs = convolve(inputs.permute(0, 1, 3, 4, 2), weight, bias, geometry)
        return outputs.permute(0, 1, 4, 2, 3)

    def reference(inputs, weight, bias):
        tasks = zip(inputs, weight, bias, strict=True)
        _, stride, padding = geometry
        return torch.stack([F.conv2d(x, w, b, stride, padding) for x, w, b in tasks])

    results = derivatives(ours, (argument, weight, bias), wrt)
    expected = derivatives(reference, (argument, weight, bias), wrt)
    tolerance = 1e-12 if dtype == torch.float64 else 3e-5
    for result, wanted in zip(results, expected, strict=True):
        atol = tolerance * wanted.abs().max().item()
        torch.testing.assert_close(result, wanted, rtol=0, atol=atol)


def test_fourth_derivative():
    torch.manual_seed(0)
    inputs, weight = numbers(1, 2, 5, 4, 16), numbers(1, 16, 16, 3, 3)

    def fourth(convolution):
        value = convolution(inputs, weight).tanh().sum()  # nonlinear: no derivative is zero
        for wrt in (inputs, weight, inputs, weight):
            value = torch.autograd.grad(value, wrt, create_graph=True)[0].square().sum()
        return value

    def reference(inputs, weight):
        return F.conv2d(inputs[0].permute(0, 3, 1, 2), weight[0], padding=1)

    expected = fourth(reference)
    torch.testing.assert_close(
        fourth(lambda *args: convolve(*args, None)), expected, rtol=1e-9, atol=0
    )


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("before", [1, 16])
def test_batched_and_unbatched_layer_are_bit_identical(before, stride):
    torch.manual_seed(0)
    layer = Conv2d(before, 32, 3, stride=stride, padding=1)
    inputs = torch.randn(3, 4, before, 13, 12)
    weight, bias = torch.randn(3, 32, before, 3, 3), torch.randn(3, 32)
    batched = functional_call(layer, {"weight": weight, "bias": bias}, (inputs,))
    for task in range(3):
        parameters = {"weight": weight[task], "bias": bias[task]}
        unbatched = functional_call(layer, parameters, (inputs[task],))
        assert torch.equal(unbatched, batched[task])


def can_convolve(layer, inputs):
    return convolution.can_convolve(inputs, layer.weight, layer.bias, layer.geometry)


def test_can_convolve():
    layer, inputs = Conv2d(16, 16, 3, padding=1), torch.zeros(1, 16, 4, 4)
    assert can_convolve(layer, inputs)
    assert can_convolve(Conv2d(16, 16, 5, padding=1, stride=2), inputs)
    assert not can_convolve(Conv2d(16, 10, 3, padding=1), inputs)  # 10 do not fill vectors
    assert not can_convolve(Conv2d(16, 16, 7, padding=1), inputs)  # larger than the inputs
    assert not can_convolve(layer, inputs.double())
    assert not can_convolve(Conv2d(16, 16, 3, padding=1, device="meta"), inputs)
    assert not can_convolve(Conv2d(12, 16, 3, padding=1), torch.zeros(1, 12, 4, 4))
    assert can_convolve(Conv2d(1, 16, 3, padding=1), torch.zeros(1, 1, 4, 4))
    assert can_convolve(Conv2d(1, 16, 3, stride=2), torch.zeros(1, 1, 4, 4))
    assert can_convolve(Conv2d(3, 16, 4), torch.zeros(1, 3, 9, 9))  # 48 values for an output
    assert not can_convolve(Conv2d(1, 16, 7), torch.zeros(1, 1, 9, 9))  # 49
    assert not can_convolve(
        Conv2d(1, 16, 3, padding=1), torch.zeros(1, 1, 4, 4, requires_grad=True)
    )
    mixed = Conv2d(16, 16, 3, padding=1)
    mixed.bias = torch.nn.Parameter(mixed.bias.double())
    assert not can_convolve(mixed, inputs)
    torch.set_num_threads(2)
    assert not can_convolve(layer, inputs)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (Conv2d(16, 16, 3, padding=1), (2, 32, 8, 8)),
        (Conv2d(3, 16, 3, padding=1), (2, 1, 8, 8)),
        (Conv2d(16, 16, 3, padding=1, dtype=torch.float64), (2, 16, 8, 8)),
    ],
    ids=["channels", "few channels", "type"],
)
def test_mismatches_raise_pytorchs_error(layer, shape):
    assert not can_convolve(layer, torch.zeros(shape))
    with pytest.raises(RuntimeError):
        layer(torch.zeros(shape))


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("before", [1, 16])
def test_without_a_bias_and_with_some_gradients(before, stride):
    torch.manual_seed(0)
    geometry = Geometry((3, 3), (stride, stride), (1, 1))
    inputs, weight = numbers(2, 3, before, 13, 12), numbers(2, 32, before, 3, 3)

    def ours(inputs, weight):
        return convolve(inputs.permute(0, 1, 3, 4, 2), weight, None, geometry)

    def reference(inputs, weight):
        each = zip(inputs, weight, strict=True)
        found = torch.stack([F.conv2d(x, w, None, stride, 1) for x, w in each])
        return found.permute(0, 1, 3, 4, 2)

    cases = [((inputs.detach(), weight), [weight])]
    if before == 16:  # of few channels there is no gradient by the inputs
        cases.append(((inputs, weight.detach()), [inputs]))
    for given, wrt in cases:
        found, expected = (derivatives(f, given, wrt) for f in (ours, reference))
        for mine, other in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize("stride", [1, 2])
def test_compilers_see_pytorchs_operations(stride):
    layer = Conv2d(16, 16, 3, stride=stride, padding=1)
    graphs = []

    def record(graph, inputs):
        graphs.append(graph)
        return graph.forward

    inputs = torch.randn(2, 16, 6, 6)
    compiled = torch.compile(layer, fullgraph=True, backend=record)(inputs)
    torch.testing.assert_close(compiled, layer(inputs), rtol=1e-4, atol=1e-5)
    assert len(graphs) == 1


@pytest.mark.parametrize("options", [{"stride": 0}, {"padding": -1}])
def test_impossible_geometries_raise_pytorchs_error(options):
    layer = Conv2d(16, 16, 3, **options)
    with pytest.raises(RuntimeError, match=r"non-positive stride|negative padding"):
        layer(torch.zeros(2, 16, 8, 8))


def test_forward_mode_derivatives_are_pytorchs():
    layer, inputs = Conv2d(16, 16, 3, padding=1), torch.rand(2, 16, 6, 6)
    with forward_ad.dual_level():
        outputs = layer(forward_ad.make_dual(inputs, inputs.sin()))
        tangent = forward_ad.unpack_dual(outputs).tangent
    torch.testing.assert_close(tangent, F.conv2d(inputs.sin(), layer.weight, padding=1))


@pytest.mark.parametrize(
    ("weight", "bias", "shape"),
    [
        ((3, 16, 16, 3, 3), (16,), (3, 2, 16, 6, 6)),
        ((2, 16, 16, 3, 3), (2, 16), (3, 2, 16, 4, 4)),  # numbers of tasks
        ((16, 16, 3, 3), (4,), (2, 16, 6, 6)),
        ((16, 8, 3, 3), (16,), (2, 16, 6, 6)),
    ],
)
def test_parameters_of_another_shape_are_an_error(weight, bias, shape):
    layer = Conv2d(16, 16, 3, padding=1)
    parameters = {"weight": torch.randn(weight), "bias": torch.zeros(bias)}
    with pytest.raises(RuntimeError):
        functional_call(layer, parameters, (torch.randn(shape),))


@pytest.mark.parametrize("native", [True, False])
def test_a_kernel_larger_than_the_inputs_is_an_error(native):
    layer = Conv2d(4, 5, 3, stride=2, native=native)
    parameters = {"weight": torch.randn(2, 5, 4, 3, 3), "bias": torch.zeros(2, 5)}
    with pytest.raises(RuntimeError, match="a kernel of 3×3 is larger than the inputs of 2×2"):
        functional_call(layer, parameters, (torch.randn(2, 300, 4, 2, 2),))


@pytest.mark.parametrize("stride", [1, 2])
def test_no_images(stride):
    layer = Conv2d(4, 5, 3, stride=stride, padding=1)
    parameters = {"weight": torch.randn(2, 5, 4, 3, 3), "bias": torch.zeros(2, 5)}
    size = 6 // stride
    found = functional_call(layer, parameters, (torch.randn(2, 0, 4, 6, 6),))
    assert found.shape == (2, 0, 5, size, size)


def test_a_negation_that_pytorch_puts_off_is_computed():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(1, 2, 5, 5, 16, generator=generator)
    weight = torch.randn(1, 16, 16, 3, 3, generator=generator)
    negative = torch._neg_view(inputs)  # noqa: SLF001  # as the imaginary part of a conjugate
    assert negative.is_neg()
    assert torch.equal(convolve(negative, weight, None), convolve(-inputs, weight, None))
