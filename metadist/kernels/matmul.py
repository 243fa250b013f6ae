"""Batched matrix products that are bit-identical for any number of tasks."""

from ctypes import Structure
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from metadist.kernels.loader import backend, call, int64_fields
from metadist.kernels.transforms import has_memory, in_functorch, is_traced

_SOURCE = "matmul"
_MIN_BLAS_PRODUCTS = 2**16
"""The number of multiplications per task from which on one BLAS call per task is faster."""
_MIN_BLAS_DEPTH = 32
"""The length of the sums from which on BLAS is faster."""
_ALIGNMENT = 64
_BLOCK_ROWS = 8192
"""The most rows that a GPU multiplies at once; see `_row_blocks`."""


class _Shape(Structure):
    _fields_ = int64_fields("tasks", "rows", "depth", "width", "transpose_a", "transpose_b")


def matmul(a: Tensor, b: Tensor, bias: Tensor | None = None, native: bool = True) -> Tensor:
    """A batched matrix product plus a bias, differentiable any number of times.

    On CPUs, `torch.bmm` is not used: BLAS libraries choose a kernel by the number of matrices, so
    that a task's rounding would depend on the batch size. Instead, each task's product is computed
    separately, in C++ or, also under autocast, with `torch.mm`. On GPUs, under torch.func
    transforms, `torch.compile` and `pytorch_operations`, and for tensors with a dispatch of their
    own (`has_memory`), PyTorch's batched operations are used.

    Args:
        a: the left matrices, of shape (tasks, n, depth), or one of shape (n, depth).
        b: the right matrices, of shape (tasks, depth, width) or (depth, width).
        bias: the biases, of shape (tasks, width) or (width,), added to each row; None for none.
        native: whether to use C++ where it is supported.

    Returns:
        The products, of shape (tasks, n, width) or (n, width). One product has the bits that it has
        in a batch.

    Raises:
        RuntimeError: shapes, types or devices do not match.
    """
    if a.dim() == b.dim() == 2:
        bias = None if bias is None else bias.unsqueeze(0)
        return matmul(a.unsqueeze(0), b.unsqueeze(0), bias, native).squeeze(0)
    if (
        not a.is_cpu
        or torch.compiler.is_compiling()
        or in_functorch()
        or not (is_traced() or has_memory((a, b, bias)))
    ):
        blocks = _row_blocks(a.shape[1]) if a.is_cuda else 1
        if blocks > 1:
            tasks, rows, _ = a.shape
            a = a.reshape(tasks * blocks, rows // blocks, -1)
            b = b.repeat_interleave(blocks, 0)
            bias = None if bias is None else bias.repeat_interleave(blocks, 0)
            return matmul(a, b, bias).view(tasks, rows, -1)
        return a @ b if bias is None else torch.baddbmm(bias.unsqueeze(1), a, b)
    a, b = to_autocast_dtype(a), to_autocast_dtype(b)
    bias = None if bias is None else to_autocast_dtype(bias)
    operands = (a, b) if bias is None else (a, b, bias)
    if not (
        a.dim() == b.dim() == 3
        and len(a) == len(b)
        and a.shape[2] == b.shape[1]
        and (bias is None or bias.shape == (len(b), b.shape[2]))
        and all((x.dtype, x.device) == (a.dtype, a.device) for x in operands)
    ):
        types = ", ".join(f"{tuple(x.shape)} {x.dtype} {x.device}" for x in operands)
        raise RuntimeError(f"these matrices cannot be multiplied in batches: {types}")
    # Contiguous here: tensors saved for double backward must be inputs of the function.
    a, transpose_a = _stored(a)
    b, transpose_b = _stored(b)
    return _Matmul.apply(a, b, bias, transpose_a, transpose_b, native)


def _row_blocks(rows: int) -> int:
    """The number of blocks of equal size in which a GPU multiplies rows.

    Its gradient with respect to the right matrix is a sum over the rows, of which each block is
    computed in parallel.
    """
    fewest = -(-rows // _BLOCK_ROWS)
    return next((n for n in range(fewest, 8 * fewest) if rows % n == 0), 1)


def to_autocast_dtype(tensor: Tensor) -> Tensor:
    """The tensor in the type of matrix products: autocast's type, or unchanged without autocast."""
    device = tensor.device.type
    if tensor.is_meta or not torch.is_autocast_enabled(device) or tensor.dtype is torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(device))


def _stored(matrices: Tensor) -> tuple[Tensor, bool]:
    """Contiguous matrices, and whether they are transposed.

    BLAS rounding depends on the transposition, so only the strides within a task decide it.
    """
    rows, columns = matrices.shape[1:]
    row_step, column_step = matrices.stride()[1:]
    contiguous_rows = column_step == 1 and row_step >= columns
    transposed = not contiguous_rows and row_step == 1 and column_step >= rows
    return (matrices.mT if transposed else matrices).contiguous(), transposed


def _is_aligned(matrix: Tensor) -> bool:
    """Whether a matrix is aligned like a new tensor; BLAS rounding depends on the alignment."""
    return matrix.data_ptr() % _ALIGNMENT == 0


def _aligned(matrix: Tensor) -> Tensor:
    return matrix if _is_aligned(matrix) else matrix.clone()


class _Matmul(Function):
    """A B + bias, with A or B possibly stored transposed."""

    @staticmethod
    def forward(
        ctx: Any,
        a: Tensor,
        b: Tensor,
        bias: Tensor | None,
        transpose_a: bool,
        transpose_b: bool,
        native: bool,
    ) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.settings = transpose_a, transpose_b, native
        left, right = (a.mT if transpose_a else a), (b.mT if transpose_b else b)
        if is_traced():
            product = torch.bmm(left, right)
            return product if bias is None else product + bias.unsqueeze(1)
        out = a.new_empty(len(a), left.shape[1], right.shape[2])
        (_, rows, depth), width = left.shape, right.shape[2]
        small = rows * depth * width < _MIN_BLAS_PRODUCTS or depth < _MIN_BLAS_DEPTH
        if native and small and backend(a) == "cpp":
            shape = _Shape(*left.shape, width, transpose_a, transpose_b)
            bias = None if bias is None else bias.contiguous()
            call(_SOURCE, "matmul", a.dtype, shape, a, b, bias, out)
            return out
        for task in range(len(a)):
            operands = _aligned(left[task]), _aligned(right[task])
            target = out[task] if _is_aligned(out[task]) else torch.empty_like(out[task])
            if bias is None:
                torch.mm(*operands, out=target)
            else:
                torch.addmm(_aligned(bias[task]), *operands, out=target)
            if target.data_ptr() != out[task].data_ptr():
                out[task].copy_(target)
        return out

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Any, ...]:
        a, b = ctx.saved_tensors
        transpose_a, transpose_b, native = ctx.settings
        grad_a = grad_b = grad_bias = None
        left, right = (a.mT if transpose_a else a), (b.mT if transpose_b else b)
        if ctx.needs_input_grad[0]:
            if transpose_a:
                grad_a = matmul(right, grad_output.mT, native=native)
            else:
                grad_a = matmul(grad_output, right.mT, native=native)
        if ctx.needs_input_grad[1]:
            if transpose_b:
                grad_b = matmul(grad_output.mT, left, native=native)
            else:
                grad_b = matmul(left.mT, grad_output, native=native)
        if ctx.needs_input_grad[2]:
            grad_bias = grad_output.sum(1)
        return grad_a, grad_b, grad_bias, None, None, None
