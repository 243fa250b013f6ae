"""Triton kernels against PyTorch's operations.

Run by `test_gpu_kernels.py` in Triton's interpreter, and by `test_on_gpu.py` on a GPU.
"""

import pytest
import torch
import torch.nn.functional as F

from metadist.kernels import convolution_gpu, norm_relu_pool_gpu
from metadist.kernels.norm_relu import norm_relu_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # there in Triton's interpreter
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 1e-2}


def random(*shape, dtype):
    return torch.randn(shape, dtype=torch.float64).to(dtype).to(DEVICE)


def unwritten(like, dtype=None):
    return torch.full(like.shape, torch.nan, dtype=dtype or like.dtype, device=DEVICE)


def assert_near(found, expected, dtype):
    for mine, other in zip(found, expected, strict=True):
        error = (mine.double() - other.double()).norm() / other.double().norm()
        assert error <= TOLERANCE[dtype]


def exact(*tensors):
    """The tensors in float64, requiring grad."""
    return [tensor.double().requires_grad_() for tensor in tensors]


@pytest.fixture(autouse=True)
def several_tiles_and_parts(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(norm_relu_pool_gpu, "_ELEMENTS", 256)
    monkeypatch.setattr(norm_relu_pool_gpu, "_PART_TILES", 2)
    monkeypatch.setattr(convolution_gpu, "_PART_ROWS", 64)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.mark.parametrize(
    ("window", "size", "channels", "dtype"),
    [
        (1, (6, 5), 12, torch.float64),
        pytest.param(1, (7, 7), 8, torch.float64, marks=pytest.mark.slow),
        pytest.param(2, (6, 5), 12, torch.float64, marks=pytest.mark.slow),
        (2, (7, 7), 8, torch.float64),
        pytest.param(2, (7, 6), 8, torch.float32, marks=pytest.mark.slow),
        pytest.param(2, (7, 6), 8, torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_norm_relu_and_pooling_are_twice_differentiable(window, size, channels, dtype):
    y = 2 * random(2, 2, *size, channels, dtype=dtype) + 5
    parameters = torch.float32 if dtype is torch.bfloat16 else dtype
    y[:, :1] = y[:, :1].round()  # equal values in windows
    weight, bias = (random(2, channels, dtype=parameters) for _ in range(2))
    weight[:, 0] = bias[:, 0] = 0
    inputs = exact(y, weight, bias)
    rows, scale, shift = inputs[0].flatten(1, 3), inputs[1].unsqueeze(1), inputs[2].unsqueeze(1)
    expected = norm_relu_rows(rows, scale, shift, 1e-5)[0].view(y.shape)
    if window == 2:
        images = expected.flatten(0, 1).permute(0, 3, 1, 2)
        expected = F.max_pool2d(images, 2).permute(0, 2, 3, 1).unflatten(0, (2, 2))
    out, mean, inverse = unwritten(expected, parameters), unwritten(weight), unwritten(weight)
    norm_relu_pool_gpu.forward(window, y, weight, bias, 1e-5, out, mean, inverse)
    assert_near([out], [expected], dtype)

    gradient = random(*expected.shape, dtype=parameters)
    (exact_gradient,) = exact(gradient)
    first = torch.autograd.grad(expected, inputs, exact_gradient, create_graph=True)
    dy, mean_z, mean_zh = unwritten(y), unwritten(mean), unwritten(mean)
    saved = (gradient, y, weight, bias, mean, inverse)
    norm_relu_pool_gpu.backward(window, *saved, dy, mean_z, mean_zh)
    count = y[0, ..., 0].numel()
    assert_near([dy, mean_zh * count, mean_z * count], first, dtype)

    tangents = [random(*tensor.shape, dtype=tensor.dtype) for tensor in (y, weight, bias)]
    second = torch.autograd.grad(first, (exact_gradient, *inputs[:2]), exact(*tangents))
    outputs = [unwritten(tensor) for tensor in (gradient, y, weight)]
    norm_relu_pool_gpu.double_backward(window, *tangents, *saved, mean_z, mean_zh, *outputs)
    assert_near(outputs, second, dtype)


@pytest.mark.parametrize(
    ("max_parts", "images"), [pytest.param(128, 4, marks=pytest.mark.slow), (3, 2)]
)
def test_sums_of_many_parts(monkeypatch, max_parts, images):
    monkeypatch.setattr(norm_relu_pool_gpu, "_ELEMENTS", 32)
    monkeypatch.setattr(norm_relu_pool_gpu, "_PART_TILES", 1)
    monkeypatch.setattr(norm_relu_pool_gpu, "_MAX_PARTS", max_parts)
    monkeypatch.setattr(convolution_gpu, "_MAX_PARTS", max_parts)
    y, weight = random(1, images, 8, 5, 8, dtype=torch.float64), random(1, 8, dtype=torch.float64)
    out, mean, inverse = unwritten(y), unwritten(weight), unwritten(weight)
    norm_relu_pool_gpu.forward(1, y, weight, weight, 1e-5, out, mean, inverse)
    rows = y.flatten(1, 3)
    moments = rows.mean(1), (rows.var(1, correction=0) + 1e-5).rsqrt()
    assert_near([mean, inverse], moments, y.dtype)
    dy, mean_z, mean_zh = unwritten(y), unwritten(weight), unwritten(weight)
    norm_relu_pool_gpu.backward(1, y, y, weight, weight, mean, inverse, dy, mean_z, mean_zh)
    z = torch.where(out > 0, y, 0).flatten(1, 3)
    h = (rows - mean.unsqueeze(1)) * inverse.unsqueeze(1)
    assert_near([mean_z, mean_zh], [z.mean(1), (z * h).mean(1)], y.dtype)
    by_weight, by_bias = random(1, 1, 1, 8, 8, dtype=y.dtype), unwritten(weight)
    convolution_gpu.weight_grad((1, 1), (1, 1), (0, 0), y, y, by_weight, by_bias)
    assert_near([by_weight, by_bias], [rows.mT @ rows, rows.sum(1)], y.dtype)


def test_what_is_not_a_number_stays_so():
    y, ones = torch.ones(1, 2, 2, 2, 8, device=DEVICE), torch.ones(1, 8, device=DEVICE)
    y[..., 3] = torch.nan
    out = unwritten(torch.empty(1, 2, 1, 1, 8))
    norm_relu_pool_gpu.forward(2, y, ones, ones, 1e-5, out, torch.empty_like(ones), ones.clone())
    assert out.isnan().all((0, 1, 2, 3)).tolist() == [channel == 3 for channel in range(8)]


@pytest.mark.parametrize(
    ("channels", "kernel", "stride", "padding", "dtype"),
    [
        ((1, 8), (3, 3), (1, 1), (1, 1), torch.float64),
        ((3, 20), (3, 3), (2, 1), (1, 1), torch.float64),
        ((16, 24), (5, 3), (2, 2), (2, 0), torch.float64),
        pytest.param(*((16, 72), (1, 1), (1, 1), (0, 0), torch.float64), marks=pytest.mark.slow),
        ((40, 16), (3, 3), (1, 1), (1, 1), torch.float32),
        pytest.param(
            *((16, 16), (3, 3), (1, 1), (1, 1), torch.bfloat16),
            marks=pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter multiplies the bits"),
        ),
    ],
)
def test_convolutions_and_their_transposes(channels, kernel, stride, padding, dtype):
    tasks, geometry = 2, (kernel, stride, padding)
    x = random(tasks, 2, 7, 6, channels[0], dtype=dtype)
    weight = random(tasks, *kernel, *channels, dtype=dtype)
    bias = random(tasks, channels[1], dtype=dtype)
    inputs = exact(x, weight, bias)
    outputs = [
        F.conv2d(images.permute(0, 3, 1, 2), taps.permute(3, 2, 0, 1), shift, stride, padding)
        for images, taps, shift in zip(*inputs, strict=True)
    ]
    expected = torch.stack(outputs).permute(0, 1, 3, 4, 2)
    gradient = random(*expected.shape, dtype=dtype)
    gradients = torch.autograd.grad(expected, inputs, gradient.double())

    out = unwritten(expected, dtype)
    convolution_gpu.convolve(*geometry, x, weight, bias, out)
    without_bias = unwritten(expected, dtype)
    convolution_gpu.convolve(*geometry, x, weight, None, without_bias)
    shift = inputs[2].view(tasks, 1, 1, 1, -1)
    assert_near([out, without_bias], [expected, expected - shift], dtype)
    found = [unwritten(tensor) for tensor in (x, weight, bias)]
    convolution_gpu.conv_transpose(*geometry, gradient, weight, found[0])
    convolution_gpu.weight_grad(*geometry, x, gradient, *found[1:])
    assert_near(found, gradients, dtype)


@pytest.mark.slow
def test_a_task_has_the_same_bits_in_any_batch():
    x, weight = random(5, 3, 9, 9, 16, dtype=torch.float32), random(5, 16, dtype=torch.float32)
    taps = random(5, 3, 3, 16, 16, dtype=torch.float32)
    results = []
    for tasks in (slice(0, 5), slice(3, 4)):
        parts = [tensor[tasks].contiguous() for tensor in (x, weight, taps)]
        out, mean, inverse = unwritten(parts[0]), unwritten(parts[1]), unwritten(parts[1])
        norm_relu_pool_gpu.forward(1, *parts[:2], parts[1], 1e-5, out, mean, inverse)
        by_taps, by_bias = unwritten(parts[2]), unwritten(parts[1])
        convolution_gpu.weight_grad((3, 3), (1, 1), (1, 1), parts[0], out, by_taps, by_bias)
        results.append([out, mean, inverse, by_taps, by_bias])
    for many, one in zip(*results, strict=True):
        assert torch.equal(many[3:4], one)
