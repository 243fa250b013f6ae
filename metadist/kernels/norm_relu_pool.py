"""Batch norm, ReLU and 2×2 max-pooling in few passes over memory, with their second derivatives.

The operations are in C++, for one thread of a CPU, and in Triton, for GPUs (`norm_relu_pool_gpu`):
the separate operations take longer than the convolutions between them. Derivatives of the third
order and on are computed by PyTorch's operations.
"""

from ctypes import Structure
from itertools import compress
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from metadist.kernels.loader import (
    VECTOR_BYTES,
    Backend,
    backend,
    call,
    in_memory,
    int64_fields,
)
from metadist.kernels.norm_relu import statistics
from metadist.kernels.transforms import differentiable_gradients, is_eager, is_transformed

NormBackend = Backend | Literal["torch"]
"""How a norm is computed: in C++, in Triton or in PyTorch's operations."""

MIN_ELEMENTS = 2**15
"""The size of the inputs from which PyTorch's norm is slower than `norm_relu_rows` for one task."""

_SOURCE = "norm_relu_pool"


class _Shape(Structure):
    _fields_ = int64_fields("tasks", "images", "height", "width", "channels", "window")


def norm_backend(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, window: int, native: bool
) -> NormBackend | None:
    """How to compute batch norm and ReLU of tensors; None leaves them, and errors, to PyTorch.

    - "cpp", "triton": by `norm_relu_pool`, of norms with a bias. In C++, channels must fill whole
      vectors; in Triton, tasks must be batched. See also `backend`.
    - "torch": by `norm_relu_rows`, of many values of a single task on a CPU, where PyTorch's batch
      norm of channels-last inputs rounds 30 times as much and takes up to five times as long with
      two derivatives. PyTorch's norm remains under autocast, and where `is_eager` does not hold.

    Args:
        inputs: the norm's inputs, of shape (…, n, channels, *size).
        weight: the norm's weights, of shape (…, channels).
        bias: the norm's biases, of the same shape, or None.
        window: 2 to pool, else 1.
        native: whether to use C++ and Triton where they are supported.
    """
    channel = weight.dim()
    size = inputs.shape[channel + 1 :]
    if not (
        inputs.shape[: channel - 1] == weight.shape[:-1]
        and inputs.shape[channel : channel + 1] == weight.shape[-1:]
        and (bias is None or bias.shape == weight.shape)
        and inputs.shape[channel - 1] * size.numel() > 1  # values per channel
    ):
        return None
    if native and bias is not None and (window == 1 or (len(size) == 2 and min(size) >= window)):
        found = backend(inputs, weight, bias)
        if found == "cpp" and weight.shape[-1] * weight.element_size() % VECTOR_BYTES == 0:
            return found
        # In Triton, statistics are of the weight's type.
        if found == "triton" and channel == 2 and weight.dtype is not torch.bfloat16:
            return found if inputs.numel() > 0 else None
    if (
        channel == 1
        and inputs.numel() >= MIN_ELEMENTS
        and inputs.is_cpu
        and inputs.dtype == weight.dtype
        and inputs.dtype in (torch.float32, torch.float64)
        and is_eager(inputs, weight, bias)
    ):
        return "torch"
    return None


def norm_relu_pool(
    inputs: Tensor, weight: Tensor, bias: Tensor, eps: float, window: int
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Batch norm, ReLU and, with a window of 2, 2×2 max-pooling, batched and channels last.

    It is differentiable any number of times with respect to inputs, weight and bias.

    Args:
        inputs: the norm's inputs, of shape (tasks, n, height, width, channels).
        weight: the norm's weights, of shape (tasks, channels).
        bias: the norm's biases, of shape (tasks, channels).
        eps: the norm's eps.
        window: 2 to pool, else 1.

    Returns:
        The outputs, of shape (tasks, n, height // window, width // window, channels), and the mean
        and the unbiased variance of the inputs, of shape (tasks, channels), without gradients; None
        in Triton.
    """
    # Contiguous here: tensors saved for double backward must be inputs of the function.
    tensors = (tensor.contiguous() for tensor in (inputs, weight, bias))
    return _NormReLUPool.apply(*tensors, eps, window)


def _call(function: str, window: int, y: Tensor, *arguments: Tensor | float | None) -> None:
    """Call a function of the source, or the one of this name in Triton, for inputs like `y`."""
    if y.is_cuda:
        from metadist.kernels import norm_relu_pool_gpu  # imports Triton

        getattr(norm_relu_pool_gpu, function)(window, *map(in_memory, arguments))
    else:
        call(_SOURCE, f"{function}_{window}", y.dtype, _Shape(*y.shape, window), *arguments)


def _norm_relu_pool(y: Tensor, weight: Tensor, bias: Tensor, eps: float, window: int) -> Tensor:
    """What the kernels compute, in PyTorch's operations."""
    rows = y.flatten(1, -2).to(weight.dtype)
    mean, inverse = statistics(rows, eps)
    out = (weight.unsqueeze(1) * (rows - mean) * inverse + bias.unsqueeze(1)).relu().view(y.shape)
    if window == 1:
        return out
    pooled = F.max_pool2d(out.flatten(0, 1).movedim(-1, 1), window)
    return pooled.movedim(1, -1).unflatten(0, y.shape[:2])


class _NormReLUPool(Function):
    @staticmethod
    def forward(
        ctx: Any, y: Tensor, weight: Tensor, bias: Tensor, eps: float, window: int
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        tasks, n, height, width, channels = y.shape
        out = weight.new_empty(tasks, n, height // window, width // window, channels)
        mean, inverse = torch.empty_like(weight), torch.empty_like(weight)
        variance = torch.empty_like(weight) if weight.is_cpu else None
        _call("forward", window, y, y, weight, bias, eps, out, mean, inverse, variance)
        ctx.eps, ctx.window = eps, window
        ctx.save_for_backward(y, weight, bias, mean, inverse)
        if variance is None:
            return out, None, None
        ctx.mark_non_differentiable(mean, variance)
        ctx.set_materialize_grads(False)
        return out, mean, variance

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if grad_output is None:  # as from a function whose backward returns None
            return (None,) * 5
        if is_transformed(grad_output):  # no Function may be called there

            def plain(y: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
                return (_norm_relu_pool(y, weight, bias, ctx.eps, ctx.window),)

            grads = differentiable_gradients(plain, ctx.saved_tensors[:3], [grad_output])
        else:
            arguments = (grad_output.contiguous(), *ctx.saved_tensors)  # here, since it is saved
            grads = _NormReLUPoolBackward.apply(*arguments, ctx.eps, ctx.window)
        return *grads, None, None


class _NormReLUPoolBackward(Function):
    """The gradients with respect to y, weight and bias."""

    @staticmethod
    def forward(
        ctx: Any,
        grad_output: Tensor,
        y: Tensor,
        weight: Tensor,
        bias: Tensor,
        mean: Tensor,
        inverse: Tensor,
        eps: float,
        window: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dy, mean_z, mean_zh = torch.empty_like(y), torch.empty_like(mean), torch.empty_like(mean)
        inputs = (grad_output, y, weight, bias, mean, inverse)
        outputs = (dy, mean_z, mean_zh)
        _call("backward", window, y, *inputs, *outputs)
        ctx.eps, ctx.window = eps, window
        ctx.save_for_backward(*inputs, mean_z, mean_zh)
        rows = y.shape[1:-1].numel()
        return dy, mean_zh * rows, mean_z * rows

    @staticmethod
    def backward(ctx: Any, t: Tensor, t_weight: Tensor, t_bias: Tensor) -> tuple[Any, ...]:
        grad_output, y, weight, *statistics = ctx.saved_tensors
        if torch.is_grad_enabled() or is_transformed(t):
            # The gradients by those of y, weight and bias that require them.
            required = [each.requires_grad for each in (y, weight, statistics[0])]

            def first(
                gradient: Tensor, y: Tensor, weight: Tensor, bias: Tensor
            ) -> tuple[Tensor, ...]:
                out = _norm_relu_pool(y, weight, bias, ctx.eps, ctx.window)
                by = list(compress((y, weight, bias), required))
                return torch.autograd.grad(out, by, gradient, create_graph=True)

            arriving = list(compress((t, t_weight, t_bias), required))
            grads = differentiable_gradients(first, ctx.saved_tensors[:4], arriving)
            return *grads, None, None, None, None
        outputs = torch.empty_like(grad_output), torch.empty_like(y), torch.empty_like(weight)
        tangents = (t.contiguous(), t_weight.contiguous(), t_bias.contiguous())
        arguments = (*tangents, grad_output, y, weight, *statistics, *outputs)
        _call("double_backward", ctx.window, y, *arguments)
        return *outputs, None, None, None, None, None
