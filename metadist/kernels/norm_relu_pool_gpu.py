"""Batch norm, ReLU and 2×2 max-pooling on GPUs in Triton; see `norm_relu_pool.py`.

The functions have the arguments of those in `norm_relu_pool.cpp`. Sums over a task's rows are split
into parts by the number of rows only, so that a task's results are bit-identical for any number of
tasks.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

_ELEMENTS = 4096
"""The elements of a tile: rows or windows times channels."""
_PART_TILES = 32
"""The fewest tiles of a part."""
_MAX_PARTS = 128
_MAX_BLOCK_CHANNELS = 64


class _Launch(NamedTuple):
    """How the windows of a norm's inputs are divided among the programs of a kernel."""

    grid: tuple[int, int, int]
    sizes: tuple[int, ...]
    constants: dict[str, int]


def _launch(y: Tensor, window: int) -> _Launch:
    """The division of the windows, including those beyond the pooled height and width."""
    tasks, n, height, width, channels = y.shape
    windows = n * -(-height // window) * -(-width // window)
    block_c = min(_MAX_BLOCK_CHANNELS, triton.next_power_of_2(channels))
    block = max(1, _ELEMENTS // (block_c * window**2))
    tiles = -(-windows // block)
    part_tiles = max(_PART_TILES, -(-tiles // _MAX_PARTS))
    parts = -(-tiles // part_tiles)
    constants = {
        "WINDOW": window,
        "CHANNELS": channels,
        "BLOCK": block,
        "BLOCK_C": block_c,
    }
    grid = (parts, tasks, triton.cdiv(channels, block_c))
    return _Launch(grid, (n, height, width, parts, part_tiles * block), constants)


def forward(
    window: int,
    y: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    out: Tensor,
    mean: Tensor,
    inverse: Tensor,
    unbiased_variance: None = None,  # running statistics are not supported
) -> None:
    """Compute the outputs, and the mean and 1 / deviation of each channel."""
    rows = _launch(y, 1)
    moments = y.new_empty(2, len(y), rows.grid[0], y.shape[-1], dtype=weight.dtype)
    _moments[rows.grid](y, *moments, *rows.sizes, **rows.constants)
    # A constant, since Triton passes numbers in single precision.
    finish_grid = (1, *rows.grid[1:])
    _finish_moments[finish_grid](*moments, mean, inverse, *rows.sizes, EPS=eps, **rows.constants)
    windows = _launch(y, window)
    inputs = (y, weight, bias, mean, inverse)
    _forward[windows.grid](*inputs, out, *windows.sizes, **windows.constants)


def backward(
    window: int,
    gradient: Tensor,
    y: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    inverse: Tensor,
    dy: Tensor,
    mean_z: Tensor,
    mean_zh: Tensor,
) -> None:
    """Compute the gradient with respect to y, and the means of z and z h."""
    grid, sizes, constants = _launch(y, window)
    sums = y.new_empty(2, len(y), grid[0], y.shape[-1], dtype=weight.dtype)
    inputs = (gradient, y, weight, bias, mean, inverse)
    _backward_sums[grid](*inputs, *sums, *sizes, **constants)
    _backward[grid](*inputs, *sums, dy, mean_z, mean_zh, *sizes, **constants)


def double_backward(
    window: int,
    t: Tensor,
    t_weight: Tensor,
    t_bias: Tensor,
    gradient: Tensor,
    y: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    inverse: Tensor,
    mean_z: Tensor,
    mean_zh: Tensor,
    d_gradient: Tensor,
    dy: Tensor,
    d_weight: Tensor,
) -> None:
    """Compute the gradients with respect to the gradient, y and weight of a backward pass.

    t, t_weight and t_bias are the gradients with respect to dy, the sum of z h and that of z.
    """
    grid, sizes, constants = _launch(y, window)
    sums = y.new_empty(3, len(y), grid[0], y.shape[-1], dtype=weight.dtype)
    inputs = (t, gradient, y, weight, bias, mean, inverse)
    _double_backward_sums[grid](*inputs, *sums, *sizes, **constants)
    given = (t_weight, t_bias, mean_z, mean_zh)
    _double_backward[grid](*inputs, *given, *sums, d_gradient, dy, d_weight, *sizes, **constants)


_SIZES = ("n", "height", "width", "parts", "part_size")
"""Arguments by whose values no kernel is compiled again."""

# Programs of a grid (parts, tasks, blocks of channels): each computes a part of a task's windows,
# tile by tile. The tasks' tensors are one after another; offsets may need 64 bits.


@triton.jit
def _channels(BLOCK_C: tl.constexpr):
    return tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)


@triton.jit(do_not_specialize=_SIZES)
def _moments(
    y, means, squares, n, height, width, parts, part_size,
    WINDOW: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Mean and sum of squared deviations of a part of a task's rows, per channel.

    Tiles are merged as in Chan, Golub and LeVeque (1983).
    """
    part, task = tl.program_id(0), tl.program_id(1).to(tl.int64)
    dtype = means.dtype.element_ty
    rows = n * height * width
    c = _channels(BLOCK_C)
    y += task * rows * CHANNELS
    mean = tl.zeros([BLOCK_C], dtype)
    square = tl.zeros([BLOCK_C], dtype)
    first = part * part_size
    last = tl.minimum(first + part_size, rows)
    for start in range(first, last, BLOCK):
        row = start + tl.arange(0, BLOCK)
        mask = (row < last)[:, None] & (c < CHANNELS)[None, :]
        at = row.to(tl.int64)[:, None] * CHANNELS + c[None, :]
        values = tl.load(y + at, mask, 0).to(dtype)
        count = tl.minimum(last - start, BLOCK).to(dtype)
        seen = (start - first).to(dtype)
        tile_mean = tl.sum(values, 0) / count
        deviation = tl.where(mask, values - tile_mean[None, :], 0)
        delta = tile_mean - mean
        share = count / (seen + count)
        mean += delta * share
        square += tl.sum(deviation * deviation, 0) + delta * delta * (seen * share)
    to = (task * parts + part) * CHANNELS + c
    tl.store(means + to, mean, c < CHANNELS)
    tl.store(squares + to, square, c < CHANNELS)


@triton.jit(do_not_specialize=_SIZES)
def _finish_moments(
    means, squares, mean_out, inverse_out, n, height, width, parts, part_size, EPS: tl.constexpr,
    WINDOW: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Mean and 1 / deviation of a task from those of its parts."""
    task = tl.program_id(1).to(tl.int64)
    dtype = means.dtype.element_ty
    rows = n * height * width
    c = _channels(BLOCK_C)
    mean = tl.zeros([BLOCK_C], dtype)
    for first in range(0, parts, 32):
        part = first + tl.arange(0, 32)
        at = (task * parts + part)[:, None] * CHANNELS + c[None, :]
        mask = (part < parts)[:, None] & (c < CHANNELS)[None, :]
        share = tl.minimum(rows - part * part_size, part_size).to(dtype) / rows
        mean += tl.sum(tl.load(means + at, mask, 0) * share[:, None], 0)
    variance = tl.zeros([BLOCK_C], dtype)
    for first in range(0, parts, 32):
        part = first + tl.arange(0, 32)
        at = (task * parts + part)[:, None] * CHANNELS + c[None, :]
        mask = (part < parts)[:, None] & (c < CHANNELS)[None, :]
        share = tl.minimum(rows - part * part_size, part_size).to(dtype) / rows
        deviation = tl.where(mask, tl.load(means + at, mask, 0) - mean[None, :], 0)
        within = tl.load(squares + at, mask, 0) / rows
        variance += tl.sum(within + deviation * deviation * share[:, None], 0)
    inverse = 1 / tl.sqrt(variance + EPS)
    tl.store(mean_out + task * CHANNELS + c, mean, c < CHANNELS)
    tl.store(inverse_out + task * CHANNELS + c, inverse, c < CHANNELS)


@triton.jit
def _sum_parts(sums, task, parts, CHANNELS: tl.constexpr, BLOCK_C: tl.constexpr):
    """The sum over the parts of a task, per channel."""
    c = _channels(BLOCK_C)
    total = tl.zeros([BLOCK_C], sums.dtype.element_ty)
    for first in range(0, parts, 32):
        part = first + tl.arange(0, 32)
        at = (task * parts + part)[:, None] * CHANNELS + c[None, :]
        mask = (part < parts)[:, None] & (c < CHANNELS)[None, :]
        total += tl.sum(tl.load(sums + at, mask, 0), 0)
    return total


@triton.jit
def _norm(weight, bias, means, inverses, at, mask):
    """Mean, 1 / deviation, and scale and shift of the deviation from the mean, per channel."""
    mean, inverse = tl.load(means + at, mask, 0), tl.load(inverses + at, mask, 0)
    return mean, inverse, tl.load(weight + at, mask, 0) * inverse, tl.load(bias + at, mask, 0)


@triton.jit
def _positions(
    start, n, height, width,
    WINDOW: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The windows from `start` on: the index of each element in the task's inputs, shape (BLOCK,
    WINDOW ** 2, BLOCK_C), of each window in the outputs, (BLOCK, BLOCK_C), and where they exist.
    """
    across, down = tl.cdiv(width, WINDOW), tl.cdiv(height, WINDOW)
    index = start + tl.arange(0, BLOCK)
    image, row, column = index // (across * down), index // across % down, index % across
    c, i = _channels(BLOCK_C), tl.arange(0, WINDOW * WINDOW)
    y = (row * WINDOW)[:, None] + (i // WINDOW)[None, :]
    x = (column * WINDOW)[:, None] + (i % WINDOW)[None, :]
    pixel = (image.to(tl.int64)[:, None] * height + y) * width + x
    exists = (image < n)[:, None] & (y < height) & (x < width)
    at = pixel[:, :, None] * CHANNELS + c[None, None, :]
    at_mask = exists[:, :, None] & (c < CHANNELS)[None, None, :]
    # Windows at the bottom and the right of odd sizes have no output.
    pooled = (image < n) & (row < height // WINDOW) & (column < width // WINDOW)
    output = (image.to(tl.int64) * (height // WINDOW) + row) * (width // WINDOW) + column
    to = output[:, None] * CHANNELS + c[None, :]
    return at, at_mask, to, pooled[:, None] & (c < CHANNELS)[None, :]


@triton.jit
def _at_maximum(values, others, WINDOW: tl.constexpr):
    """`others` at the first of the largest values of a window if it is positive, else 0."""
    kept = values > 0
    if WINDOW > 1:
        i = tl.arange(0, WINDOW * WINDOW)[None, :, None]
        kept = kept & (i == tl.argmax(values, 1)[:, None, :])
    return tl.where(kept, others, 0)


@triton.jit
def _sum_windows(values):
    """The sum over windows and their positions, per channel."""
    return tl.sum(tl.sum(values, 1), 0)


@triton.jit(do_not_specialize=_SIZES)
def _forward(
    y, weight, bias, means, inverses, out, n, height, width, parts, part_size,
    WINDOW: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The largest of the normalized values of each window, or 0."""
    part, task = tl.program_id(0), tl.program_id(1).to(tl.int64)
    dtype = means.dtype.element_ty
    c = _channels(BLOCK_C)
    of_task, valid = task * CHANNELS + c, c < CHANNELS
    mean, _inverse, scale, shift = _norm(weight, bias, means, inverses, of_task, valid)
    y += task * n * height * width * CHANNELS
    out += task * n * (height // WINDOW) * (width // WINDOW) * CHANNELS
    first = part * part_size
    last = tl.minimum(first + part_size, n * tl.cdiv(height, WINDOW) * tl.cdiv(width, WINDOW))
    for start in range(first, last, BLOCK):
        at, _, to, pooled = _positions(start, n, height, width, WINDOW, CHANNELS, BLOCK, BLOCK_C)
        own = tl.load(y + at, pooled[:, None, :], 0).to(dtype)
        values = (own - mean) * scale + shift
        largest = tl.max(values, 1)
        # Not `maximum`: what is not a number stays so.
        tl.store(out + to, tl.where(largest <= 0, 0, largest), pooled)


@triton.jit(do_not_specialize=_SIZES)
def _backward_sums(
    gradient, y, weight, bias, means, inverses, sums_z, sums_zh,
    n, height, width, parts, part_size,
    WINDOW: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The sums of z and z h over a part of the windows; z is the gradient at a window's maximum."""
    part, task = tl.program_id(0), tl.program_id(1).to(tl.int64)
    dtype = means.dtype.element_ty
    c = _channels(BLOCK_C)
    of_task, valid = task * CHANNELS + c, c < CHANNELS
    mean, inverse, scale, shift = _norm(weight, bias, means, inverses, of_task, valid)
    y += task * n * height * width * CHANNELS
    gradient += task * n * (height // WINDOW) * (width // WINDOW) * CHANNELS
    sum_z = tl.zeros([BLOCK_C], dtype)
    sum_zh = tl.zeros([BLOCK_C], dtype)
    first = part * part_size
    last = tl.minimum(first + part_size, n * tl.cdiv(height, WINDOW) * tl.cdiv(width, WINDOW))
    for start in range(first, last, BLOCK):
        at, _, to, pooled = _positions(start, n, height, width, WINDOW, CHANNELS, BLOCK, BLOCK_C)
        own = tl.load(y + at, pooled[:, None, :], 0).to(dtype)
        arriving = tl.load(gradient + to, pooled, 0).to(dtype)
        z = _at_maximum((own - mean) * scale + shift, arriving[:, None, :], WINDOW)
        sum_z += _sum_windows(z)
        sum_zh += _sum_windows(z * ((own - mean) * inverse))
    at_part = (task * parts + part) * CHANNELS + c
    tl.store(sums_z + at_part, sum_z, valid)
    tl.store(sums_zh + at_part, sum_zh, valid)


@triton.jit(do_not_specialize=_SIZES)
def _backward(
    gradient, y, weight, bias, means, inverses, sums_z, sums_zh, dy, means_z, means_zh,
    n, height, width, parts, part_size,
    WINDOW: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Gradient by y: s (z - <z> - h <zh>) with s = weight / deviation and means <·> over rows."""
    part, task = tl.program_id(0), tl.program_id(1).to(tl.int64)
    dtype = means.dtype.element_ty
    c = _channels(BLOCK_C)
    of_task, valid = task * CHANNELS + c, c < CHANNELS
    mean, inverse, scale, shift = _norm(weight, bias, means, inverses, of_task, valid)
    rows = n * height * width
    mean_z = _sum_parts(sums_z, task, parts, CHANNELS, BLOCK_C) / rows
    mean_zh = _sum_parts(sums_zh, task, parts, CHANNELS, BLOCK_C) / rows
    if part == 0:
        tl.store(means_z + of_task, mean_z, valid)
        tl.store(means_zh + of_task, mean_zh, valid)
    y += task * rows * CHANNELS
    dy += task * rows * CHANNELS
    gradient += task * n * (height // WINDOW) * (width // WINDOW) * CHANNELS
    first = part * part_size
    last = tl.minimum(first + part_size, n * tl.cdiv(height, WINDOW) * tl.cdiv(width, WINDOW))
    for start in range(first, last, BLOCK):
        at, exists, to, pooled = _positions(
            start, n, height, width, WINDOW, CHANNELS, BLOCK, BLOCK_C
        )
        own = tl.load(y + at, exists, 0).to(dtype)
        arriving = tl.load(gradient + to, pooled, 0).to(dtype)
        z = _at_maximum((own - mean) * scale + shift, arriving[:, None, :], WINDOW)
        h = (own - mean) * inverse
        tl.store(dy + at, scale * (z - mean_z - h * mean_zh), exists)


@triton.jit(do_not_specialize=_SIZES)
def _double_backward_sums(
    t, gradient, y, weight, bias, means, inverses, sums_t, sums_th, sums_tz,
    n, height, width, parts, part_size,
    WINDOW: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The sums of t, t h and t z over a part of the windows."""
    part, task = tl.program_id(0), tl.program_id(1).to(tl.int64)
    dtype = means.dtype.element_ty
    c = _channels(BLOCK_C)
    of_task, valid = task * CHANNELS + c, c < CHANNELS
    mean, inverse, scale, shift = _norm(weight, bias, means, inverses, of_task, valid)
    rows = n * height * width
    y += task * rows * CHANNELS
    t += task * rows * CHANNELS
    gradient += task * n * (height // WINDOW) * (width // WINDOW) * CHANNELS
    sum_t = tl.zeros([BLOCK_C], dtype)
    sum_th = tl.zeros([BLOCK_C], dtype)
    sum_tz = tl.zeros([BLOCK_C], dtype)
    first = part * part_size
    last = tl.minimum(first + part_size, n * tl.cdiv(height, WINDOW) * tl.cdiv(width, WINDOW))
    for start in range(first, last, BLOCK):
        at, exists, to, pooled = _positions(
            start, n, height, width, WINDOW, CHANNELS, BLOCK, BLOCK_C
        )
        own = tl.load(y + at, exists, 0).to(dtype)
        tangent = tl.load(t + at, exists, 0).to(dtype)
        arriving = tl.load(gradient + to, pooled, 0).to(dtype)
        z = _at_maximum((own - mean) * scale + shift, arriving[:, None, :], WINDOW)
        sum_t += _sum_windows(tangent)
        sum_th += _sum_windows(tangent * ((own - mean) * inverse))
        sum_tz += _sum_windows(tangent * z)
    at_part = (task * parts + part) * CHANNELS + c
    tl.store(sums_t + at_part, sum_t, valid)
    tl.store(sums_th + at_part, sum_th, valid)
    tl.store(sums_tz + at_part, sum_tz, valid)


@triton.jit(do_not_specialize=_SIZES)
def _double_backward(
    t, gradient, y, weight, bias, means, inverses, t_weights, t_biases, means_z, means_zh,
    sums_t, sums_th, sums_tz, d_gradient, dy, d_weight, n, height, width, parts, part_size,
    WINDOW: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The derivatives of `_backward`, as in `_NormReLUBackward.backward`."""
    part, task = tl.program_id(0), tl.program_id(1).to(tl.int64)
    dtype = means.dtype.element_ty
    c = _channels(BLOCK_C)
    of_task, valid = task * CHANNELS + c, c < CHANNELS
    mean, inverse, scale, shift = _norm(weight, bias, means, inverses, of_task, valid)
    mean_z, mean_zh = tl.load(means_z + of_task, valid, 0), tl.load(means_zh + of_task, valid, 0)
    rows = n * height * width
    mean_t = _sum_parts(sums_t, task, parts, CHANNELS, BLOCK_C) / rows
    mean_th = _sum_parts(sums_th, task, parts, CHANNELS, BLOCK_C) / rows
    mean_tz = _sum_parts(sums_tz, task, parts, CHANNELS, BLOCK_C) / rows
    t_weight, t_bias = tl.load(t_weights + of_task, valid, 0), tl.load(t_biases + of_task, valid, 0)
    # By z: s (t - <t> - h <th>) + t_weight h + t_bias.
    by_h = t_weight - scale * mean_th
    z_constant = t_bias - scale * mean_t
    # Through s = weight / deviation, divided by the number of rows.
    through = mean_tz - mean_t * mean_z - mean_th * mean_zh
    if part == 0:
        tl.store(d_weight + of_task, inverse * through * rows, valid)
    # By h: by_h z - s <zh> t. By y: through h, and through the deviation.
    mean_q = by_h * mean_z - scale * mean_zh * mean_t
    mean_qh = by_h * mean_zh - scale * mean_zh * mean_th
    slope = -(mean_qh + scale * through) * inverse
    y += task * rows * CHANNELS
    t += task * rows * CHANNELS
    dy += task * rows * CHANNELS
    gradient += task * n * (height // WINDOW) * (width // WINDOW) * CHANNELS
    d_gradient += task * n * (height // WINDOW) * (width // WINDOW) * CHANNELS
    first = part * part_size
    last = tl.minimum(first + part_size, n * tl.cdiv(height, WINDOW) * tl.cdiv(width, WINDOW))
    for start in range(first, last, BLOCK):
        at, exists, to, pooled = _positions(
            start, n, height, width, WINDOW, CHANNELS, BLOCK, BLOCK_C
        )
        own = tl.load(y + at, exists, 0).to(dtype)
        tangent = tl.load(t + at, exists, 0).to(dtype)
        arriving = tl.load(gradient + to, pooled, 0).to(dtype)
        values = (own - mean) * scale + shift
        z = _at_maximum(values, arriving[:, None, :], WINDOW)
        h = (own - mean) * inverse
        by_y = inverse * (by_h * z - scale * mean_zh * tangent - mean_q) + slope * h
        tl.store(dy + at, by_y, exists)
        by_z = scale * tangent + by_h * h + z_constant
        # The one at the position to which the gradient goes.
        by_gradient = tl.sum(_at_maximum(values, by_z, WINDOW), 1)
        tl.store(d_gradient + to, by_gradient, pooled)
