"""Batch norm, ReLU and 2×2 max-pooling in few passes over memory, with their second derivatives.

The operations are in C++, for one thread of a CPU, and in Triton, for GPUs (`norm_relu_pool_gpu`):
the separate operations take longer than the convolutions between them. Batch norm with ReLU,
batched over tasks, is also in PyTorch. Derivatives of the third order and on are computed by
PyTorch's operations.
"""

from collections.abc import Callable, Sequence
from ctypes import Structure
from itertools import compress
from typing import Any, TypeGuard, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.modules.module import _has_any_global_hook

from metadist.kernels.loader import (
    VECTOR_BYTES,
    call,
    can_call,
    can_use_triton,
    has_tangent,
    in_memory,
    in_transform,
    int64_fields,
    is_transformed,
)

_SOURCE = "norm_relu_pool"

BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d

MIN_ELEMENTS = 2**15
"""The size of the inputs from which PyTorch's norm is slower than the functions of this module that
take its place for a single task."""

_DIMENSIONS = {nn.BatchNorm1d: (1, 2), nn.BatchNorm2d: (3,)}
"""How many more dimensions than the weight a norm's inputs may have."""


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
        and inputs.dim() - norm.weight.dim() in _DIMENSIONS[type(norm)]
        and inputs.shape[norm.weight.dim()] == norm.num_features
        and (norm.weight.dim() == 1 or len(inputs) == len(norm.weight))
        and _values_per_channel(norm, inputs) > 1
        and (norm.running_mean is None or inputs.numel() >= MIN_ELEMENTS)
    )


def can_fuse_norm(norm: nn.Module, inputs: Tensor) -> TypeGuard[BatchNorm]:
    """Whether a norm is supported for inputs of this type and device, of any shape.

    PyTorch's batch norms with weight and bias and without hooks are supported, if they normalize
    with the statistics of the batch: on CPUs if their channels fill whole vectors (see also
    `can_call`), on GPUs if they are batched over tasks (see also `can_use_triton`), there with
    bfloat16 inputs, too. Running statistics are supported if the norm is not batched.
    """
    return (
        is_batch_norm(norm)
        and not has_hooks(norm)
        and norm.weight is not None
        and norm.bias is not None
        and _uses_batch_statistics(norm)
        and norm.weight.shape[-1] == norm.num_features
        and norm.bias.shape == norm.weight.shape
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


def _uses_batch_statistics(norm: BatchNorm) -> bool:
    """Whether a norm normalizes with the statistics of the batch; it may keep running ones."""
    if norm.eps <= 0:
        return False  # PyTorch's error
    if norm.running_mean is None:
        return norm.running_var is None
    return norm.training and norm.running_var is not None and norm.weight.dim() == 1


def is_batch_norm(module: nn.Module) -> TypeGuard[BatchNorm]:
    """Whether a module is a batch norm of PyTorch and not a subclass, which may differ."""
    return type(module) in _DIMENSIONS


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_hooks(module: nn.Module) -> bool:
    """Whether forward or backward hooks are called for the module."""
    return any(vars(module)[hooks] for hooks in _HOOKS) or bool(_has_any_global_hook())


def _values_per_channel(norm: BatchNorm, inputs: Tensor) -> int:
    tasks = 1 if norm.weight.dim() == 1 else len(inputs)
    return inputs.numel() // (tasks * norm.num_features)


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


def can_norm_relu(norm: nn.Module, inputs: Tensor) -> TypeGuard[BatchNorm]:
    """Whether `norm_relu_rows` can take the place of an unbatched norm on a CPU.

    PyTorch's batch norm of channels-last inputs rounds 30 times as much and takes up to five times
    as long with two derivatives. It remains for evaluation with running statistics, hooks,
    autocast, torch.func transforms, forward-mode derivatives, tracing and compilation.

    Args:
        norm: a module.
        inputs: the inputs, of shape (n, channels, *size).
    """
    return (
        not torch.compiler.is_compiling()
        and is_batch_norm(norm)
        and not has_hooks(norm)
        and norm.weight is not None
        and _uses_batch_statistics(norm)
        and norm.weight.shape == (norm.num_features,)
        and (norm.bias is None or norm.bias.shape == norm.weight.shape)
        and inputs.is_cpu
        and inputs.dtype == norm.weight.dtype
        and inputs.dtype in (torch.float32, torch.float64)
        and inputs.numel() >= MIN_ELEMENTS
        and inputs.dim() - 1 in _DIMENSIONS[type(norm)]
        and inputs.shape[1] == norm.num_features
        and _values_per_channel(norm, inputs) > 1
        and not in_transform()
        and not torch.jit.is_tracing()
        and not any(has_tangent(each) for each in (inputs, norm.weight, norm.bias))
    )


def norm_relu_rows(
    inputs: Tensor, weight: Tensor, bias: Tensor, eps: float, norm: BatchNorm | None = None
) -> Tensor:
    """Batch norm and ReLU in PyTorch, batched over tasks, with explicit derivatives.

    Args:
        inputs: the inputs, of shape (tasks, rows, channels); statistics are over the rows.
        weight: the norm's weights, of shape (tasks, 1, channels).
        bias: the norm's biases, of shape (tasks, 1, channels).
        eps: the norm's eps.
        norm: the norm whose running statistics, if it has them, are updated.

    Returns:
        The outputs, of shape (tasks, rows, channels).
    """
    return _NormReLU.apply(inputs, weight, bias, eps, norm)


def tracks_statistics(norm: BatchNorm | None) -> TypeGuard[BatchNorm]:
    """Whether a norm that normalizes with the statistics of the batch updates running ones."""
    return norm is not None and norm.track_running_stats and norm.running_mean is not None


def update_running_statistics(norm: BatchNorm, mean: Tensor, unbiased_variance: Tensor) -> None:
    """Update a norm's running statistics as PyTorch does.

    Args:
        norm: the norm, not batched, for which `tracks_statistics` holds.
        mean: the mean of its inputs, of any shape with one element per channel.
        unbiased_variance: their variance, of the same shape.
    """
    momentum = norm.momentum
    if norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
        if momentum is None:  # a cumulative average
            momentum = 1 / float(norm.num_batches_tracked)
    cast(Tensor, norm.running_mean).lerp_(mean.view(-1), momentum or 0.0)
    cast(Tensor, norm.running_var).lerp_(unbiased_variance.view(-1), momentum or 0.0)


def differentiable_gradients(
    function: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor],
    gradients: Sequence[Tensor],
) -> tuple[Tensor | None, ...]:
    """The gradients of a function, recorded for further derivatives; None for constant inputs.

    Args:
        function: a function of tensors, in operations whose derivatives autograd knows.
        inputs: its arguments.
        gradients: the gradient with respect to each of its outputs.
    """
    with torch.enable_grad():
        # Aliases, since an input may be another one or computed from it.
        aliases = [tensor.view_as(tensor) for tensor in inputs]
        required = [alias for alias in aliases if alias.requires_grad]
        pairs = zip(function(*aliases), gradients, strict=True)
        outputs, arriving = zip(*(pair for pair in pairs if pair[0].requires_grad), strict=True)
        options = {"create_graph": True, "allow_unused": True}
        found = iter(torch.autograd.grad(outputs, required, arriving, **options))
    return tuple(next(found) if alias.requires_grad else None for alias in aliases)


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
    mean, inverse = _statistics(rows, eps)
    out = (weight.unsqueeze(1) * (rows - mean) * inverse + bias.unsqueeze(1)).relu().view(y.shape)
    if window == 1:
        return out
    pooled = F.max_pool2d(out.flatten(0, 1).movedim(-1, 1), window)
    return pooled.movedim(1, -1).unflatten(0, y.shape[:2])


def _statistics(rows: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The mean and 1 / deviation over dimension 1."""
    mean, variance = _moments(rows)
    return mean, (variance + eps).rsqrt()


def _moments(rows: Tensor) -> tuple[Tensor, Tensor]:
    mean = rows.mean(1, keepdim=True)
    return mean, (rows - mean).square_().mean(1, keepdim=True)


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


class _NormReLU(Function):
    """relu(γ h + β), h = (y - mean) / deviation, over dimension 1 of y (tasks, rows, features).

    Each derivative below is a linear combination of the tensors with one coefficient per feature,
    in one or two passes over memory. <·> is the mean over rows, z the gradient with respect to
    γ h + β.
    """

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, weight: Tensor, bias: Tensor, eps: float, norm: BatchNorm | None
    ) -> Tensor:
        mean, variance = _moments(y)
        rows = y.shape[1]
        if tracks_statistics(norm):
            update_running_statistics(norm, mean, variance * (rows / (rows - 1)))
        inverse = (variance + eps).rsqrt()
        scale = weight * inverse
        out = torch.addcmul(bias - mean * scale, y, scale).relu_()
        ctx.eps = eps
        ctx.save_for_backward(y, weight, mean, inverse, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        y, weight, mean, inverse, out = ctx.saved_tensors
        z = torch.ops.aten.threshold_backward(grad_output, out.detach(), 0)
        if is_transformed(grad_output):  # no Function may be called there
            return *_gradients(z, y, weight, *_statistics(y, ctx.eps))[:3], None, None
        return *_NormReLUBackward.apply(z, y, weight, mean, inverse, ctx.eps), None, None


def _gradients(
    z: Tensor, y: Tensor, weight: Tensor, mean: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """With s = γ / deviation: dy = s (z - <z> - h <zh>), dγ = Σ zh, dβ = Σ z, <z> and <zh>."""
    mean_z = z.mean(1, keepdim=True)
    mean_zh = ((y - mean) * z).mean(1, keepdim=True) * inverse
    scale = weight * inverse
    by_y = -scale * mean_zh * inverse
    dy = torch.addcmul(-scale * mean_z - by_y * mean, z, scale).addcmul_(y, by_y)
    return dy, mean_zh * y.shape[1], mean_z * y.shape[1], mean_z, mean_zh


class _NormReLUBackward(Function):
    @staticmethod
    def forward(
        ctx: Any, z: Tensor, y: Tensor, weight: Tensor, mean: Tensor, inverse: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        dy, d_weight, d_bias, mean_z, mean_zh = _gradients(z, y, weight, mean, inverse)
        ctx.eps = eps
        ctx.save_for_backward(z, y, weight, mean, inverse, mean_z, mean_zh)
        return dy, d_weight, d_bias

    @staticmethod
    def backward(ctx: Any, g: Tensor, g_weight: Tensor, g_bias: Tensor) -> tuple[Any, ...]:
        z, y, weight, mean, inverse, mean_z, mean_zh = ctx.saved_tensors
        if torch.is_grad_enabled() or is_transformed(g):

            def first(z: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
                return _gradients(z, y, weight, *_statistics(y, ctx.eps))[:3]

            grads = differentiable_gradients(first, (z, y, weight), (g, g_weight, g_bias))
            return *grads, None, None, None
        rows = y.shape[1]
        scale = weight * inverse
        mean_g = g.mean(1, keepdim=True)
        mean_gh = (y - mean).mul_(g).mean(1, keepdim=True) * inverse
        mean_gz = (g * z).mean(1, keepdim=True)
        # By z: s (g - <g> - h <gh>) + g_weight h + g_bias.
        by_h = g_weight - scale * mean_gh
        by_y = by_h * inverse
        dz = torch.addcmul(g_bias - scale * mean_g - by_y * mean, g, scale).addcmul_(y, by_y)
        # Through s = γ / deviation.
        through = rows * (mean_gz - mean_g * mean_z - mean_gh * mean_zh)
        # By h: q = by_h z - s <zh> g. By y: through h, and through the deviation.
        mean_q = by_h * mean_z - scale * mean_zh * mean_g
        mean_qh = by_h * mean_zh - scale * mean_zh * mean_gh
        by_y = -inverse * (inverse * mean_qh + weight * through * inverse.square() / rows)
        dy = torch.addcmul(-inverse * mean_q - by_y * mean, g, -inverse * scale * mean_zh)
        dy = dy.addcmul_(z, inverse * by_h).addcmul_(y, by_y)
        return dz, dy, inverse * through, None, None, None
