"""Matrix products of tasks, each of which is the same bits however many tasks there are."""

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from metadist.kernels import call, can_call

_SOURCE = "matmul"
_BLAS_FROM = 2**16
"""Multiplications of one task from which on the BLAS library is faster, called once a task."""


class _Shape(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in ("tasks", "rows", "depth", "width", "transpose_a", "transpose_b")
    )


def matmul(a: Tensor, b: Tensor, bias: Tensor | None = None, native: bool = True) -> Tensor:
    """The product of each task's matrices, plus a row. Differentiable any number of times.

    `torch.bmm` is not used on CPUs: the BLAS library chooses its kernel by the number of matrices,
    so that a task's result would depend on how many others are computed with it. Here every task
    is multiplied by itself, by compiled C++ or by `torch.mm`.

    Args:
        a: (tasks, n, depth).
        b: (tasks, depth, width).
        bias: (tasks, width), added to each row.
        native: whether to use compiled C++ where it can be.

    Returns:
        (tasks, n, width).

    Raises:
        RuntimeError: shapes or types do not fit together.
    """
    if not a.is_cpu or torch.compiler.is_compiling():
        return a @ b if bias is None else torch.baddbmm(bias.unsqueeze(1), a, b)
    fits = len(a) == len(b) and a.shape[2] == b.shape[1] and a.dtype == b.dtype
    if bias is not None:
        fits = fits and bias.shape == (len(b), b.shape[2]) and bias.dtype == a.dtype
    if not fits:
        shapes = [tuple(each.shape) for each in (a, b, bias) if each is not None]
        raise RuntimeError(f"matrices of tasks with shapes {shapes} cannot be multiplied")
    # A transposed operand is passed as it lies in memory.
    a, transpose_a = _stored(a)
    b, transpose_b = _stored(b)
    return _Matmul.apply(a, b, bias, transpose_a, transpose_b, native)


def _stored(matrices: Tensor) -> tuple[Tensor, bool]:
    if not matrices.is_contiguous() and matrices.mT.is_contiguous():
        return matrices.mT, True
    return matrices, False


_ALIGNMENT = 64


def _is_aligned(matrix: Tensor) -> bool:
    """Whether a matrix lies as a tensor of its own would: BLAS kernels round by alignment too."""
    return matrix.data_ptr() % _ALIGNMENT == 0


def _aligned(matrix: Tensor) -> Tensor:
    return matrix if _is_aligned(matrix) else matrix.clone()


class _Matmul(Function):
    """A B + bias, with A or B stored transposed."""

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
        a, b = a.contiguous(), b.contiguous()
        ctx.save_for_backward(a, b)
        ctx.settings = transpose_a, transpose_b, native
        left, right = (a.mT if transpose_a else a), (b.mT if transpose_b else b)
        out = a.new_empty(len(a), left.shape[1], right.shape[2])
        small = left.shape[1] * left.shape[2] * right.shape[2] < _BLAS_FROM
        if native and small and can_call(_SOURCE, a):
            shape = _Shape(*left.shape, right.shape[2], transpose_a, transpose_b)
            bias = None if bias is None else bias.contiguous()
            call(_SOURCE, "matmul", a.dtype, shape, a, b, bias, out)
            return out
        for i in range(len(a)):
            operands = _aligned(left[i]), _aligned(right[i])
            to = out[i] if _is_aligned(out[i]) else torch.empty_like(out[i])
            if bias is None:
                torch.mm(*operands, out=to)
            else:
                torch.addmm(_aligned(bias[i]), *operands, out=to)
            if to.data_ptr() != out[i].data_ptr():
                out[i].copy_(to)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        a, b = ctx.saved_tensors
        transpose_a, transpose_b, native = ctx.settings
        by_a = by_b = by_bias = None
        left, right = (a.mT if transpose_a else a), (b.mT if transpose_b else b)
        if ctx.needs_input_grad[0]:
            if transpose_a:
                by_a = matmul(right, gradient.mT, native=native)
            else:
                by_a = matmul(gradient, right.mT, native=native)
        if ctx.needs_input_grad[1]:
            if transpose_b:
                by_b = matmul(gradient.mT, left, native=native)
            else:
                by_b = matmul(left.mT, gradient, native=native)
        if ctx.needs_input_grad[2]:
            by_bias = gradient.sum(1)
        return by_a, by_b, by_bias, None, None, None
