"""Convolutions on GPUs in Triton, one weight per task; see `convolution.py`.

Matrix products over patches of the inputs that are not stored (implicit GEMM), in tiles that were
the fastest on an H100 among those tried for conv4. The functions have the arguments of those in
`direct.cpp`. How sums are split depends on a task's shapes only, so that its results are
bit-identical for any number of tasks.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

Pair = tuple[int, int]

_PART_ROWS = 4096
"""The fewest rows of which a program sums the weight's gradient, a multiple of a tile's rows."""
_MAX_PARTS = 64


def convolve(
    kernel: Pair, stride: Pair, padding: Pair,
    inputs: Tensor, weight: Tensor, bias: Tensor | None, outputs: Tensor,
) -> None:  # fmt: skip
    """(tasks, n, h, w, in) -> (tasks, n, h', w', out)."""
    _products(False, (kernel, stride, padding), inputs, weight, bias, outputs)


def conv_transpose(
    kernel: Pair, stride: Pair, padding: Pair, gradient: Tensor, weight: Tensor, inputs: Tensor
) -> None:  # fmt: skip
    """The transpose of `convolve`: (tasks, n, h', w', out) -> (tasks, n, h, w, in)."""
    # A small copy, since the kernel would read columns of the weight one by one.
    _products(True, (kernel, stride, padding), gradient, weight.mT.contiguous(), None, inputs)


def _products(
    transposed: bool,
    geometry: tuple[Pair, Pair, Pair],
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    outputs: Tensor,
) -> None:
    tasks, n, height, width, depth = inputs.shape
    _, _, out_height, out_width, columns = outputs.shape
    rows = n * out_height * out_width
    block_rows, block_columns = 128, _tile_size(columns, 64)
    grid = (triton.cdiv(rows, block_rows), triton.cdiv(columns, block_columns), tasks)
    _multiply[grid](
        *(inputs, weight, bias, outputs, n, height, width, out_height, out_width),
        *(pair[i] for pair in geometry for i in range(2)),
        *(transposed, depth, columns, bias is not None, _precision(inputs)),
        BLOCK_ROWS=block_rows,
        BLOCK_COLUMNS=block_columns,
        BLOCK_TERMS=_tile_size(depth, 32),
        num_warps=4,
        num_stages=3,
    )


def weight_grad(
    kernel: Pair, stride: Pair, padding: Pair,
    inputs: Tensor, gradient: Tensor, weight: Tensor, bias: Tensor,
) -> None:  # fmt: skip
    """The gradients of <gradient, convolution of the inputs> with respect to weight and bias."""
    tasks, n, height, width, channels = inputs.shape
    _, _, out_height, out_width, columns = gradient.shape
    taps, rows = kernel[0] * kernel[1] * channels, n * out_height * out_width
    largest = 64 if inputs.dtype is torch.bfloat16 else 32
    block_terms, block_columns, block_rows = _tile_size(taps, largest), _tile_size(columns, 64), 64
    part_rows = max(_PART_ROWS, -(-rows // (_MAX_PARTS * block_rows)) * block_rows)
    parts = triton.cdiv(rows, part_rows)
    dtype = torch.float64 if inputs.dtype is torch.float64 else torch.float32
    weights = weight.new_empty(tasks, parts, taps + 1, columns, dtype=dtype)
    tiles = triton.cdiv(taps, block_terms) * triton.cdiv(columns, block_columns)
    _weight_grad[(tiles, parts, tasks)](
        *(inputs, gradient, weights, n, height, width, out_height, out_width, part_rows),
        *(pair[i] for pair in (kernel, stride, padding) for i in range(2)),
        *(channels, columns, _precision(inputs)),
        BLOCK_TERMS=block_terms,
        BLOCK_COLUMNS=block_columns,
        BLOCK_ROWS=block_rows,
        num_warps=4,
        num_stages=2,
    )
    sums = weights.sum(1)
    weight.copy_(sums[:, :taps].view(weight.shape))
    bias.copy_(sums[:, taps])


def _tile_size(size: int, largest: int) -> int:
    """A power of 2 from 16, the least of a product in Triton, to `largest`."""
    return max(16, min(largest, triton.next_power_of_2(size)))


def _precision(tensor: Tensor) -> str:
    """Triton's name of the precision in which PyTorch is set to convolve float32."""
    if tensor.dtype is not torch.float32:
        return "ieee"
    cudnn: Any = torch.backends.cudnn
    try:
        return "tf32" if cudnn.allow_tf32 else "ieee"
    except RuntimeError:  # set by `fp32_precision`
        return "tf32" if cudnn.conv.fp32_precision == "tf32" else "ieee"


_SIZES = ("n", "height", "width", "out_height", "out_width", "part_rows")
"""Arguments by whose values no kernel is compiled again."""


@triton.jit(do_not_specialize=_SIZES)
def _multiply(
    inputs, weight, bias, outputs, n, height, width, out_height, out_width,
    KERNEL_H: tl.constexpr, KERNEL_W: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PADDING_H: tl.constexpr, PADDING_W: tl.constexpr, TRANSPOSED: tl.constexpr,
    DEPTH: tl.constexpr, COLUMNS: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_TERMS: tl.constexpr,
):  # fmt: skip
    """outputs[row, column] = bias[column] + Σ inputs at the row's taps · weight[tap, column]."""
    task = tl.program_id(2).to(tl.int64)
    dtype = tl.float64 if inputs.dtype.element_ty == tl.float64 else tl.float32
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    image, y, x = row // out_width // out_height, row // out_width % out_height, row % out_width
    inputs += task * n * height * width * DEPTH
    weight += task * KERNEL_H * KERNEL_W * DEPTH * COLUMNS
    outputs += task * n * out_height * out_width * COLUMNS
    sums = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], dtype)
    for start in range(0, KERNEL_H * KERNEL_W * DEPTH, BLOCK_TERMS):
        term = start + tl.arange(0, BLOCK_TERMS)
        tap, channel = term // DEPTH, term % DEPTH
        if TRANSPOSED:
            up = (y + PADDING_H)[:, None] - (tap // KERNEL_W)[None, :]
            left = (x + PADDING_W)[:, None] - (tap % KERNEL_W)[None, :]
            in_y, in_x = up // STRIDE_H, left // STRIDE_W
            mask = (up >= 0) & (left >= 0) & (in_y < height) & (in_x < width)
            if STRIDE_H * STRIDE_W > 1:
                mask = mask & (up % STRIDE_H == 0) & (left % STRIDE_W == 0)
        else:
            in_y = (y * STRIDE_H - PADDING_H)[:, None] + (tap // KERNEL_W)[None, :]
            in_x = (x * STRIDE_W - PADDING_W)[:, None] + (tap % KERNEL_W)[None, :]
            mask = (in_y >= 0) & (in_x >= 0) & (in_y < height) & (in_x < width)
        mask = mask & (image < n)[:, None] & (tap < KERNEL_H * KERNEL_W)[None, :]
        pixel = (image.to(tl.int64)[:, None] * height + in_y) * width + in_x
        a = tl.load(inputs + pixel * DEPTH + channel[None, :], mask, 0)
        in_weight = (tap < KERNEL_H * KERNEL_W)[:, None] & (column < COLUMNS)[None, :]
        b = tl.load(weight + term[:, None] * COLUMNS + column[None, :], in_weight, 0)
        sums += tl.dot(a, b, input_precision=PRECISION, out_dtype=dtype)
    valid = column < COLUMNS
    if BIAS:
        sums += tl.load(bias + task * COLUMNS + column, valid, 0).to(dtype)[None, :]
    to = row.to(tl.int64)[:, None] * COLUMNS + column[None, :]
    tl.store(outputs + to, sums, (image < n)[:, None] & valid[None, :])


@triton.jit(do_not_specialize=_SIZES)
def _weight_grad(
    inputs, gradient, sums, n, height, width, out_height, out_width, part_rows,
    KERNEL_H: tl.constexpr, KERNEL_W: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PADDING_H: tl.constexpr, PADDING_W: tl.constexpr,
    CHANNELS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_TERMS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """sums[term, column] = Σ inputs at the term's tap · gradient[row, column] over a part of the
    rows; the last term is the sum of the gradient.
    """
    part, task = tl.program_id(1), tl.program_id(2).to(tl.int64)
    dtype = sums.dtype.element_ty
    TERMS: tl.constexpr = KERNEL_H * KERNEL_W * CHANNELS
    tiles = tl.cdiv(COLUMNS, BLOCK_COLUMNS)
    first_term = tl.program_id(0) // tiles * BLOCK_TERMS
    term = first_term + tl.arange(0, BLOCK_TERMS)
    column = tl.program_id(0) % tiles * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    tap, channel = term // CHANNELS, term % CHANNELS
    valid = column < COLUMNS
    rows = n * out_height * out_width
    inputs += task * n * height * width * CHANNELS
    gradient += task * rows * COLUMNS
    sums += (task * tl.num_programs(1) + part) * (TERMS + 1) * COLUMNS
    products = tl.zeros([BLOCK_TERMS, BLOCK_COLUMNS], dtype)
    totals = tl.zeros([BLOCK_COLUMNS], dtype)
    last = tl.minimum((part + 1) * part_rows, rows)
    for start in range(part * part_rows, last, BLOCK_ROWS):
        row = start + tl.arange(0, BLOCK_ROWS)
        image, y, x = row // out_width // out_height, row // out_width % out_height, row % out_width
        in_y = (y * STRIDE_H - PADDING_H)[None, :] + (tap // KERNEL_W)[:, None]
        in_x = (x * STRIDE_W - PADDING_W)[None, :] + (tap % KERNEL_W)[:, None]
        mask = (in_y >= 0) & (in_x >= 0) & (in_y < height) & (in_x < width)
        mask = mask & (row < last)[None, :] & (term < TERMS)[:, None]
        pixel = (image.to(tl.int64)[None, :] * height + in_y) * width + in_x
        a = tl.load(inputs + pixel * CHANNELS + channel[:, None], mask, 0)
        at = row.to(tl.int64)[:, None] * COLUMNS + column[None, :]
        b = tl.load(gradient + at, (row < last)[:, None] & valid[None, :], 0)
        products += tl.dot(a, b, input_precision=PRECISION, out_dtype=dtype)
        if first_term == 0:
            totals += tl.sum(b.to(dtype), 0)
    to = term[:, None] * COLUMNS + column[None, :]
    tl.store(sums + to, products, (term < TERMS)[:, None] & valid[None, :])
    if first_term == 0:
        tl.store(sums + TERMS * COLUMNS + column, totals, valid)
