"""3×3 convolution with stride 1 and padding 1 in C++.

With many input and output channels it is a Winograd convolution, F(2×2, 3×3) of Lavin and Gray
(2015, arXiv 1509.09308), equal to the direct one up to rounding. PyTorch's convolution is made for
large batches and many cores; this one for the few images of a support set on one core, and for
batched tasks with one weight each. Differentiable any number of times.
"""

import ctypes
from typing import Any

from torch import Tensor, nn
from torch.autograd import Function

from metadist.kernels.loader import VECTOR_BYTES, call, can_call

_MANY, _FEW = "winograd", "few_channels"
_MAX_TAPS = 48  # of an output, with few channels


class ConvShape(ctypes.Structure):
    """Shape of a convolution; the fields are those of the C++ struct."""

    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in ("tasks", "images", "height", "width", "in_channels", "out_channels")
    )


def can_convolve(layer: nn.Conv2d, inputs: Tensor) -> bool:
    """Whether `convolve` supports the layer and the inputs.

    It supports 3×3 kernels with stride and padding 1, output channels that fill vectors, and input
    channels that fill vectors or are few and require no grad; see also `can_call`. Shapes and
    types that do not match are left to PyTorch, which raises the error.

    Args:
        layer: its parameters may be batched over tasks.
        inputs: (…, n, channels, height, width).
    """
    source = _source(layer.in_channels, inputs)
    return (
        (layer.kernel_size, layer.stride, layer.padding) == ((3, 3), (1, 1), (1, 1))
        and inputs.dim() == layer.weight.dim()
        and inputs.shape[-3] == layer.in_channels
        and layer.weight.shape[-4:] == (layer.out_channels, layer.in_channels, 3, 3)
        and (layer.bias is None or layer.bias.shape == layer.weight.shape[:-3])
        and (inputs.dim() == 4 or len(inputs) == len(layer.weight))
        and all(_matches(inputs, part) for part in (layer.weight, layer.bias) if part is not None)
        and layer.out_channels * inputs.element_size() % VECTOR_BYTES == 0
        and inputs.numel() > 0
        and (source == _MANY or has_few_channels(layer, inputs))
        and can_call(source, inputs)
    )


def has_few_channels(layer: nn.Conv2d, inputs: Tensor) -> bool:
    """Whether the inputs have few channels and require no grad, as images do."""
    few = _source(layer.in_channels, inputs) == _FEW and 9 * layer.in_channels <= _MAX_TAPS
    return few and not inputs.requires_grad


def convolve(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Convolution of batched tasks, channels last.

    Args:
        inputs: (tasks, n, height, width, in).
        weight: (tasks, out, in, 3, 3).
        bias: (tasks, out), or None.

    Returns:
        (tasks, n, height, width, out).
    """
    parts = (inputs, weight) if bias is None else (inputs, weight, bias)
    return _Convolve.apply(*(part.contiguous() for part in parts))


def _matches(inputs: Tensor, parameter: Tensor) -> bool:
    return parameter.dtype == inputs.dtype and parameter.device == inputs.device


def _source(channels: int, inputs: Tensor) -> str:
    return _MANY if channels * inputs.element_size() % VECTOR_BYTES == 0 else _FEW


class _Convolve(Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        outputs = inputs.new_empty(*inputs.shape[:-1], weight.shape[1])
        shape = ConvShape(*inputs.shape, weight.shape[1])
        source = _source(inputs.shape[-1], inputs)
        call(source, "convolve", inputs.dtype, shape, inputs, weight, bias, outputs)
        ctx.save_for_backward(inputs, weight)
        return outputs

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        grad_output = grad_output.contiguous()
        grad_inputs = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_inputs = _ConvTranspose.apply(grad_output, weight)
        if any(ctx.needs_input_grad[1:]):
            grad_weight, grad_bias = _WeightGrad.apply(inputs, grad_output)
        return (grad_inputs, grad_weight, grad_bias)[: len(ctx.needs_input_grad)]


class _ConvTranspose(Function):
    """From the shape of the outputs of `_Convolve` to that of its inputs."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        outputs = inputs.new_empty(*inputs.shape[:-1], weight.shape[2])
        shape = ConvShape(*inputs.shape, weight.shape[2])
        call(_MANY, "conv_transpose", inputs.dtype, shape, inputs, weight, outputs)
        ctx.save_for_backward(inputs, weight)
        return outputs

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        grad_output = grad_output.contiguous()
        grad_inputs = _Convolve.apply(grad_output, weight) if ctx.needs_input_grad[0] else None
        grad_weight = _WeightGrad.apply(grad_output, inputs)[0] if ctx.needs_input_grad[1] else None
        return grad_inputs, grad_weight


class _WeightGrad(Function):
    """Gradients of <gradient, convolution of the inputs> by weight and bias."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        in_channels, out_channels = inputs.shape[-1], gradient.shape[-1]
        weight = inputs.new_empty(len(inputs), out_channels, in_channels, 3, 3)
        bias = inputs.new_empty(len(inputs), out_channels)
        source, shape = _source(in_channels, inputs), ConvShape(*inputs.shape, out_channels)
        call(source, "weight_grad", inputs.dtype, shape, inputs, gradient, weight, bias)
        ctx.save_for_backward(inputs, gradient)
        return weight, bias

    @staticmethod
    def backward(ctx: Any, grad_weight: Tensor, grad_bias: Tensor) -> tuple[Tensor | None, ...]:
        inputs, gradient = ctx.saved_tensors
        weight = grad_weight.contiguous()
        grad_inputs = _ConvTranspose.apply(gradient, weight) if ctx.needs_input_grad[0] else None
        grad_gradient = None
        if ctx.needs_input_grad[1]:
            grad_gradient = _Convolve.apply(inputs, weight, grad_bias.contiguous())
        return grad_inputs, grad_gradient
