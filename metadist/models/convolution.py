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

from metadist.kernels import LANES, call, can_call

_MANY, _FEW = "winograd", "few_channels"
_TAPS = 48  # of an output, at most, where channels are few


class MapsShape(ctypes.Structure):
    """How large a convolution is; its fields, in this order, are those of the C++."""

    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in ("groups", "images", "height", "width", "inputs", "outputs")
    )


def can_convolve(layer: nn.Conv2d, maps: Tensor) -> bool:
    """Whether `convolve` does what the layer would do to these maps.

    It takes kernels of 3×3 with stride and padding of 1, outputs that fill vectors, inputs that do,
    or few of them that no derivative is asked by; and what `can_call` asks for. What does not fit
    together it leaves to PyTorch, which says why.
    """
    one, source = (1, 1), _source(layer.in_channels, maps)
    return (
        (layer.kernel_size, layer.stride, layer.padding) == ((3, 3), one, one)
        and maps.dim() == layer.weight.dim()
        and maps.shape[-3] == layer.in_channels
        and (maps.dim() == 4 or len(maps) == len(layer.weight))
        and all(like(maps, part) for part in (layer.weight, layer.bias) if part is not None)
        and layer.out_channels * maps.element_size() % LANES == 0
        and maps.numel() > 0
        and (source == _MANY or has_few_channels(layer, maps))
        and can_call(source, maps)
    )


def like(maps: Tensor, parameter: Tensor) -> bool:
    """Whether a parameter has the maps' type of numbers and lies where they do."""
    return parameter.dtype == maps.dtype and parameter.device == maps.device


def has_few_channels(layer: nn.Conv2d, maps: Tensor) -> bool:
    """Whether maps go through the layer as images do: few channels, and no derivative by them."""
    few = _source(layer.in_channels, maps) == _FEW and 9 * layer.in_channels <= _TAPS
    return few and not maps.requires_grad


def _source(channels: int, maps: Tensor) -> str:
    if channels * maps.element_size() % LANES == 0:
        return _MANY
    return _FEW


def convolve(maps: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The convolution of tasks' maps, each with weights of its own.

    Args:
        maps: (tasks, n, height, width, in).
        weight: (tasks, out, in, 3, 3).
        bias: (tasks, out), or None.

    Returns:
        (tasks, n, height, width, out).
    """
    given = (maps, weight) if bias is None else (maps, weight, bias)
    return _Convolve.apply(*(each.contiguous() for each in given))


class _Convolve(Function):
    """The convolution."""

    @staticmethod
    def forward(ctx: Any, maps: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        outputs = maps.new_empty(*maps.shape[:-1], weight.shape[1])
        shape = MapsShape(*maps.shape, weight.shape[1])
        source = _source(maps.shape[-1], maps)
        call(source, "convolve", maps.dtype, shape, maps, weight, bias, outputs)
        ctx.save_for_backward(maps, weight)
        return outputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        maps, weight = ctx.saved_tensors
        gradient = gradient.contiguous()
        by_maps = by_weight = by_bias = None
        if ctx.needs_input_grad[0]:
            by_maps = _Transposed.apply(gradient, weight)
        if any(ctx.needs_input_grad[1:]):
            by_weight, by_bias = _ByWeight.apply(maps, gradient)
        return (by_maps, by_weight, by_bias)[: len(ctx.needs_input_grad)]


class _Transposed(Function):
    """Its transpose: from maps like its outputs to maps like its inputs."""

    @staticmethod
    def forward(ctx: Any, maps: Tensor, weight: Tensor) -> Tensor:
        outputs = maps.new_empty(*maps.shape[:-1], weight.shape[2])
        shape = MapsShape(*maps.shape, weight.shape[2])
        call(_MANY, "transposed", maps.dtype, shape, maps, weight, outputs)
        ctx.save_for_backward(maps, weight)
        return outputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        maps, weight = ctx.saved_tensors
        gradient = gradient.contiguous()
        by_maps = _Convolve.apply(gradient, weight) if ctx.needs_input_grad[0] else None
        by_weight = _ByWeight.apply(gradient, maps)[0] if ctx.needs_input_grad[1] else None
        return by_maps, by_weight


class _ByWeight(Function):
    """The derivatives by weight and bias of <gradient, convolution of maps>."""

    @staticmethod
    def forward(ctx: Any, maps: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        before, after = maps.shape[-1], gradient.shape[-1]
        weight = maps.new_empty(len(maps), after, before, 3, 3)
        bias = maps.new_empty(len(maps), after)
        source, shape = _source(before, maps), MapsShape(*maps.shape, after)
        call(source, "by_weight", maps.dtype, shape, maps, gradient, weight, bias)
        ctx.save_for_backward(maps, gradient)
        return weight, bias

    @staticmethod
    def backward(ctx: Any, t_weight: Tensor, t_bias: Tensor) -> tuple[Tensor | None, ...]:
        maps, gradient = ctx.saved_tensors
        t_weight, by_maps, by_gradient = t_weight.contiguous(), None, None
        if ctx.needs_input_grad[0]:
            by_maps = _Transposed.apply(gradient, t_weight)
        if ctx.needs_input_grad[1]:
            by_gradient = _Convolve.apply(maps, t_weight, t_bias.contiguous())
        return by_maps, by_gradient
