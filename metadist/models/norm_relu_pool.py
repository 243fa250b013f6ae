"""Batch norm, ReLU and 2×2 max-pooling as one operation, in few passes over memory.

On a CPU these three, one after the other, take longer than the convolutions between them, for
they stream every map through memory a dozen times. Here it is two passes in each direction, in
C++ that `native` compiles, with the first and the second derivative written out.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from metadist.kernels import LANES, call, can_call

_SOURCE = "norm_relu_pool"


class _Shape(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in ("groups", "images", "height", "width", "channels", "window")
    )


def can_fuse(norm: nn.Module, maps: Tensor) -> bool:
    """Whether `fused` does what the norm, a ReLU and pooling would do to these maps.

    It takes batch norm by the batch's own statistics, with weight and bias, on the CPU, on one
    thread, outside of torch.func's transforms and of torch.compile; several values a channel, as
    `torch.nn.functional.batch_norm` wants them; and a C++ compiler.
    """
    return (
        takes_norm(norm, maps)
        and maps.dim() > norm.weight.dim()
        and maps.shape[norm.weight.dim()] == norm.num_features
        and (norm.weight.dim() == 1 or len(maps) == len(norm.weight))
        and _values_a_channel(norm, maps) > 1
    )


def takes_norm(norm: nn.Module, like: Tensor) -> bool:
    """The same, but for the number of values, for maps of a tensor's type and device."""
    return (
        isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d)
        and norm.running_mean is None
        and norm.weight is not None
        and like.dtype == norm.weight.dtype
        and like.device == norm.weight.device
        and norm.num_features * like.element_size() % LANES == 0
        and can_call(_SOURCE, like)
    )


def _values_a_channel(norm: nn.Module, maps: Tensor) -> int:
    tasks = 1 if norm.weight.dim() == 1 else len(maps)
    return maps.numel() // (tasks * norm.num_features)


def fused(norm: nn.Module, maps: Tensor, pool: bool) -> Tensor:
    """The norm, a ReLU and, with `pool`, the maximum of each 2×2 square.

    Args:
        norm: as `can_fuse` wants it, with parameters of shape (channels,), or (tasks, channels)
            side by side.
        maps: (…, n, channels, *size), with tasks in front if the parameters have them.
        pool: whether to take maxima: size is then (height, width).

    Returns:
        (…, n, channels, *pooled size). It can be differentiated twice by maps, weight and bias.
    """
    alone = norm.weight.dim() == 1
    weight, bias = (p.unsqueeze(0) if alone else p for p in (norm.weight, norm.bias))
    together = maps.unsqueeze(0) if alone else maps
    last = together.movedim(2, -1)  # (tasks, n, *size, channels)
    rows = last.reshape(*last.shape[:2], *(last.shape[2:-1] or (1, 1)), last.shape[-1])
    out = fused_rows(rows, weight, bias, norm.eps, 2 if pool else 1)
    out = out.reshape(*last.shape[:2], *(out.shape[2:-1] if last.dim() > 3 else ()), out.shape[-1])
    out = out.movedim(-1, 2)
    return out.squeeze(0) if alone else out


def fused_rows(maps: Tensor, weight: Tensor, bias: Tensor, eps: float, window: int) -> Tensor:
    """(tasks, n, h, w, channels) -> (tasks, n, h // window, w // window, channels).

    Args:
        maps: see above.
        weight: of the norm, (tasks, channels).
        bias: as the weight.
        eps: of the norm.
        window: 2 to pool, else 1.
    """
    # Made contiguous here: what `_Fused` saves must be its inputs, to be differentiated by again.
    return _Fused.apply(maps.contiguous(), weight.contiguous(), bias.contiguous(), eps, window)


class _Fused(Function):
    """(tasks, n, h, w, channels) -> (tasks, n, h', w', channels)."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, weight: Tensor, bias: Tensor, eps: float, window: int
    ) -> Tensor:
        tasks, n, height, width, channels = y.shape
        out = y.new_empty(tasks, n, height // window, width // window, channels)
        mean, inverse = torch.empty_like(weight), torch.empty_like(weight)
        arguments = (y, weight, bias, eps, out, mean, inverse)
        call(_SOURCE, "forward", y.dtype, _Shape(*y.shape, window), *arguments)
        ctx.window = window
        ctx.save_for_backward(y, weight, bias, mean, inverse)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return *_FusedBackward.apply(gradient, *ctx.saved_tensors, ctx.window), None, None


class _FusedBackward(Function):
    """The derivatives by y, weight and bias."""

    @staticmethod
    def forward(
        ctx: Any,
        gradient: Tensor,
        y: Tensor,
        weight: Tensor,
        bias: Tensor,
        mean: Tensor,
        inverse: Tensor,
        window: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        gradient = gradient.contiguous()
        dy, mean_z, mean_zh = torch.empty_like(y), torch.empty_like(mean), torch.empty_like(mean)
        inputs = (gradient, y, weight, bias, mean, inverse)
        outputs = (dy, mean_z, mean_zh)
        call(_SOURCE, "backward", y.dtype, _Shape(*y.shape, window), *inputs, *outputs)
        ctx.window = window
        ctx.save_for_backward(*inputs, mean_z, mean_zh)
        rows = y[0, ..., 0].numel()
        return dy, mean_zh * rows, mean_z * rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, t: Tensor, t_weight: Tensor, t_bias: Tensor) -> tuple[Any, ...]:
        gradient, y, weight, *others = ctx.saved_tensors
        outputs = torch.empty_like(gradient), torch.empty_like(y), torch.empty_like(weight)
        asked = (t.contiguous(), t_weight.contiguous(), t_bias.contiguous())
        arguments = (*asked, gradient, y, weight, *others, *outputs)
        call(_SOURCE, "second", y.dtype, _Shape(*y.shape, ctx.window), *arguments)
        return *outputs, None, None, None, None
