"""Convolution of 3×3 with stride 1 and padding 1, in C++ that `native` compiles.

Where both sides have many channels it is by minimal filtering, F(2×2, 3×3) of Lavin and Gray
(2015, arXiv 1509.09308), which takes 16 products where the definition takes 36; the numbers are
the same to rounding. PyTorch's own is made for large batches and many cores; this serves the five
images of a support set on one, and many tasks with weights of their own. Every derivative is a
convolution, its transpose, or the derivative by the weights, so that it can be differentiated any
number of times.
"""

import ctypes
from typing import Any

from torch import Tensor, nn
from torch.autograd import Function

from metadist.models.native import LANES, call, can_call

_MANY, _FEW = "winograd", "few_channels"
_TAPS_AT_MOST = 48  # of one output, with few channels: they lie in the cache beside their pixels


class _Shape(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in ("groups", "images", "height", "width", "inputs", "outputs")
    )


def can_convolve(layer: nn.Conv2d, maps: Tensor) -> bool:
    """Whether `convolve` does what the layer would do to these maps.

    It takes kernels of 3×3 with stride and padding of 1, outputs that fill vectors, inputs that do,
    or few of them that no derivative is asked by; and what `can_call` asks for.
    """
    one = (1, 1)
    return (
        (layer.kernel_size, layer.stride, layer.padding) == ((3, 3), one, one)
        and maps.dtype == layer.weight.dtype
        and layer.out_channels * maps.element_size() % LANES == 0
        and (source := _source(layer.in_channels, maps)) is not None
        and (source == _MANY or not maps.requires_grad)
        and maps.numel() > 0
        and can_call(source, maps)
    )


def _source(channels: int, maps: Tensor) -> str | None:
    if channels * maps.element_size() % LANES == 0:
        return _MANY
    return _FEW if 9 * channels <= _TAPS_AT_MOST else None


def convolve(maps: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The convolution of tasks' maps, each with weights of its own.

    Args:
        maps: (tasks, n, height, width, in).
        weight: (tasks, out, in, 3, 3).
        bias: (tasks, out), or None.

    Returns:
        (tasks, n, height, width, out).
    """
    outputs = _Convolve.apply(maps.contiguous(), weight.contiguous(), False)
    return outputs if bias is None else outputs + bias[:, None, None, None]


class _Convolve(Function):
    """The convolution, or its transpose, from maps like its outputs to maps like its inputs."""

    @staticmethod
    def forward(ctx: Any, maps: Tensor, weight: Tensor, transposed: bool) -> Tensor:
        source = _source(maps.shape[-1], maps)
        outputs = maps.new_empty(*maps.shape[:-1], weight.shape[2 if transposed else 1])
        shape = _Shape(*maps.shape, outputs.shape[-1])
        function = "transposed" if transposed else "convolve"
        call(source, function, maps.dtype, shape, maps, weight, outputs)
        ctx.transposed = transposed
        ctx.save_for_backward(maps, weight)
        return outputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        maps, weight = ctx.saved_tensors
        gradient = gradient.contiguous()
        by_maps = by_weight = None
        if ctx.needs_input_grad[0]:
            by_maps = _Convolve.apply(gradient, weight, not ctx.transposed)
        if ctx.needs_input_grad[1]:
            pair = (gradient, maps) if ctx.transposed else (maps, gradient)
            by_weight = _ByWeight.apply(*pair)
        return by_maps, by_weight, None


class _ByWeight(Function):
    """The derivative by the weights of <gradient, convolution of maps>."""

    @staticmethod
    def forward(ctx: Any, maps: Tensor, gradient: Tensor) -> Tensor:
        channels = maps.shape[-1], gradient.shape[-1]
        weight = maps.new_empty(len(maps), *channels[::-1], 3, 3)
        shape = _Shape(*maps.shape[:-1], *channels)
        call(_source(channels[0], maps), "by_weight", maps.dtype, shape, maps, gradient, weight)
        ctx.save_for_backward(maps, gradient)
        return weight

    @staticmethod
    def backward(ctx: Any, t: Tensor) -> tuple[Tensor | None, ...]:
        maps, gradient = ctx.saved_tensors
        t = t.contiguous()
        by_maps = _Convolve.apply(gradient, t, True) if ctx.needs_input_grad[0] else None
        by_gradient = _Convolve.apply(maps, t, False) if ctx.needs_input_grad[1] else None
        return by_maps, by_gradient
