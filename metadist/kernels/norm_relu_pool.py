"""Batch norm, ReLU and 2×2 max-pooling in few passes over memory, with their second derivatives.

The operations are in C++, for one thread of a CPU, and in Triton, for GPUs (`norm_relu_pool_gpu`):
the separate operations take longer than the convolutions between them. Derivatives of the third
order and on are computed by PyTorch's operations.
"""

from ctypes import Structure
from itertools import compress
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from metadist.kernels.batch_norm import (
    MIN_ELEMENTS,
    BatchNorm,
    fits,
    is_supported,
    tracks_statistics,
    update_running_statistics,
)
from metadist.kernels.loader import (
    VECTOR_BYTES,
    call,
    can_call,
    can_use_triton,
    in_memory,
    int64_fields,
)
from metadist.kernels.norm_relu import statistics
from metadist.kernels.transforms import differentiable_gradients, has_tangent, is_transformed

_SOURCE = "norm_relu_pool"


class _Shape(Structure):
    _fields_ = int64_fields("tasks", "images", "height", "width", "channels", "window")


def can_fuse_norm_relu_pool(norm: nn.Module, inputs: Tensor) -> TypeGuard[BatchNorm]:
    """Whether `fused_norm_relu_pool` supports the norm and the inputs.

    Args:
        norm: a module; the parameters of a batch norm may be batched over tasks.
        inputs: the inputs, of shape (…, n, channels, *size), with more than one value per channel.
    """
    return (
        can_fuse_norm(norm, inputs)
        and fits(norm, inputs)
        and (norm.running_mean is None or inputs.numel() >= MIN_ELEMENTS)
    )


def can_fuse_norm(norm: nn.Module, inputs: Tensor) -> TypeGuard[BatchNorm]:
    """Whether a norm is supported for inputs of this type and device, of any shape.

    Batch norms with weight and bias are, if `is_supported` holds: on CPUs if their channels fill
    whole vectors (see also `can_call`), on GPUs if they are batched over tasks (see also
    `can_use_triton`), there with bfloat16 inputs, too.
    """
    return (
        is_supported(norm)
        and norm.bias is not None
        and inputs.device == norm.weight.device
        and (
            (can_use_triton(inputs, norm.weight, norm.bias) and _matches_triton(norm, inputs))
            or (
                inputs.dtype == norm.weight.dtype
                and norm.num_features * inputs.element_size() % VECTOR_BYTES == 0
                and can_call(_SOURCE, inputs, norm.weight, norm.bias)
            )
        )
        and not any(has_tangent(each) for each in (inputs, norm.weight, norm.bias))
    )


_TRITON_TYPES = (
    (torch.float32, torch.float32),
    (torch.float64, torch.float64),
    (torch.bfloat16, torch.float32),
)
"""Types of the inputs and of the parameters."""


def _matches_triton(norm: BatchNorm, inputs: Tensor) -> bool:
    types = (inputs.dtype, norm.weight.dtype)
    return norm.weight.dim() == 2 and inputs.numel() > 0 and types in _TRITON_TYPES


def fused_norm_relu_pool(norm: BatchNorm, inputs: Tensor, pool: bool) -> Tensor:
    """Batch norm, ReLU and, with `pool`, 2×2 max-pooling; see `can_fuse_norm_relu_pool`.

    It is differentiable with respect to inputs, weight and bias. Running statistics are updated.

    Args:
        norm: the batch norm, with parameters of shape (channels,) or, batched, (tasks, channels).
        inputs: the inputs, of shape (n, channels, *size) or, batched, (tasks, n, channels, *size);
            size has at most two dimensions.
        pool: whether to pool; size is then (height, width).

    Returns:
        The outputs, of shape (…, n, channels, *size); with `pool`, height and width are halved and
        rounded down.
    """
    unbatched = norm.weight.dim() == 1
    weight, bias = (p.unsqueeze(0) if unbatched else p for p in (norm.weight, norm.bias))
    batched = inputs.unsqueeze(0) if unbatched else inputs
    channels_last = batched.movedim(2, -1)  # (tasks, n, *size, channels)
    tasks, n, *size, channels = channels_last.shape
    images = channels_last.reshape(tasks, n, *[1] * (0 if pool else 2 - len(size)), *size, channels)
    window = 2 if pool else 1
    out = norm_relu_pool_channels_last(images, weight, bias, float(norm.eps), window, norm)
    out = (out if pool else out.reshape(channels_last.shape)).movedim(-1, 2)
    return out.squeeze(0) if unbatched else out


def norm_relu_pool_channels_last(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    window: int,
    norm: BatchNorm | None = None,
) -> Tensor:
    """(tasks, n, h, w, channels) -> (tasks, n, h // window, w // window, channels).

    Args:
        inputs: the norm's inputs.
        weight: the norm's weights, of shape (tasks, channels).
        bias: the norm's biases, of shape (tasks, channels).
        eps: the norm's eps.
        window: 2 to pool, else 1.
        norm: the norm whose running statistics, if it has them, are updated.
    """
    # Contiguous here: tensors saved for double backward must be inputs of the function.
    tensors = (tensor.contiguous() for tensor in (inputs, weight, bias))
    return _NormReLUPool.apply(*tensors, eps, window, norm)


def _call(function: str, window: int, y: Tensor, *arguments: Tensor | float | None) -> None:
    """Call a function of the source, or the one of this name in Triton, for inputs like `y`."""
    if y.is_cuda:
        from metadist.kernels import norm_relu_pool_gpu  # imports Triton

        getattr(norm_relu_pool_gpu, function)(window, *map(in_memory, arguments))
    else:
        call(_SOURCE, function, y.dtype, _Shape(*y.shape, window), *arguments)


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
        ctx: Any,
        y: Tensor,
        weight: Tensor,
        bias: Tensor,
        eps: float,
        window: int,
        norm: BatchNorm | None,
    ) -> Tensor:
        tasks, n, height, width, channels = y.shape
        out = weight.new_empty(tasks, n, height // window, width // window, channels)
        mean, inverse = torch.empty_like(weight), torch.empty_like(weight)
        variance = torch.empty_like(weight) if tracks_statistics(norm) else None
        _call("forward", window, y, y, weight, bias, eps, out, mean, inverse, variance)
        if norm is not None and variance is not None:
            update_running_statistics(norm, mean, variance)
        ctx.eps, ctx.window = eps, window
        ctx.save_for_backward(y, weight, bias, mean, inverse)
        return out

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        if is_transformed(grad_output):  # no Function may be called there

            def plain(y: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
                return (_norm_relu_pool(y, weight, bias, ctx.eps, ctx.window),)

            grads = differentiable_gradients(plain, ctx.saved_tensors[:3], [grad_output])
        else:
            arguments = (grad_output.contiguous(), *ctx.saved_tensors)  # here, since it is saved
            grads = _NormReLUPoolBackward.apply(*arguments, ctx.eps, ctx.window)
        return *grads, None, None, None


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
        rows = y[0, ..., 0].numel()
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
