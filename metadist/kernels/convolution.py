"""Convolutions for small support sets on one core of a CPU and for batched tasks.

PyTorch's convolution is made for large batches and many cores, and has one weight for all images;
these convolutions have one weight per task. They are in C++ for CPUs, and in Triton for batched
tasks on GPUs (`convolution_gpu`). On CPUs, a 3×3 convolution of many channels with paddings of at
most 1 and strides of 1, or of 2 along dimensions with at least 6 outputs (up to 128 channels),
takes fewer products, by minimal filtering (Winograd, 1980; Lavin and Gray, 2015,
arXiv 1509.09308); for finite values it is equal to the direct convolution up to rounding.
Convolutions are differentiable any number of times in reverse mode; forward-mode derivatives of
gradients (`torch.autograd.forward_ad`) and `is_grads_batched` need layers with `native=False`.
"""

from ctypes import Structure
from itertools import chain
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd import Function

from metadist.kernels.loader import VECTOR_BYTES, backend, call, in_memory, int64_fields

_WINOGRAD, _DIRECT, _FEW_CHANNELS = "winograd", "direct", "few_channels"
_MAX_VALUES = 48  # of inputs that an output is computed from, with few channels
_MIN_STRIDED_OUTPUTS = 6
"""Outputs along a dimension with stride 2 from which on minimal filtering is faster."""
_MAX_STRIDED_CHANNELS = 128
"""Channels up to which it is faster with stride 2."""

Pair = tuple[int, int]
"""Two numbers, for the vertical and the horizontal dimension."""


class _ConvShape(Structure):
    _fields_ = int64_fields(
        *("tasks", "images", "height", "width", "in_channels", "out_channels"),
        *("kernel_h", "kernel_w", "stride_h", "stride_w", "padding_h", "padding_w"),
    )


class Geometry(NamedTuple):
    """Kernel size, stride and padding of a convolution."""

    kernel: Pair
    stride: Pair
    padding: Pair

    def output_size(self, height: int, width: int) -> Pair:
        """The height and width of outputs for a size of inputs; not positive if there are none."""
        rows, columns = (
            (size + 2 * padding - kernel) // stride + 1
            for size, kernel, stride, padding in zip((height, width), *self, strict=True)
        )
        return rows, columns


SAME = Geometry((3, 3), (1, 1), (1, 1))
"""The 3×3 geometry with outputs as large as the inputs."""


def conv_shape(inputs: Tensor, out_channels: int, geometry: Geometry) -> Structure:
    """The shape of a convolution as the struct that the C++ functions take.

    Args:
        inputs: the inputs, of shape (tasks, n, height, width, in).
        out_channels: the number of output channels.
        geometry: kernel, stride and padding.
    """
    return _ConvShape(*inputs.shape, out_channels, *chain(*geometry))


def can_convolve(inputs: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> bool:
    """Whether `convolve` supports tensors, batched over tasks or unbatched.

    On CPUs, output channels must fill whole vectors. Input channels must fill whole vectors too; or
    an output is computed from few values, of inputs that require no grad. On GPUs, tasks must be
    batched. See also `backend`. Shapes and types that do not match are left to PyTorch, which
    raises the error.

    Args:
        inputs: the inputs, of shape (…, n, in, height, width).
        weight: the weights, of shape (…, out, in, kernel height, kernel width).
        bias: the biases, of shape (…, out), or None.
        geometry: kernel, stride and padding.
    """
    if not (
        inputs.dim() == weight.dim()
        and inputs.shape[:-4] == weight.shape[:-4]
        and inputs.shape[-3] == weight.shape[-3]
        and inputs.numel() > 0
        and inputs.dtype == weight.dtype
        and (bias is None or (bias.shape == weight.shape[:-3] and bias.dtype == weight.dtype))
        and min(geometry.stride) > 0
        and min(geometry.padding) >= 0
        and min(geometry.output_size(*inputs.shape[-2:])) > 0
    ):
        return False
    found = backend(inputs, weight, bias)
    if found == "triton":
        return weight.dim() == 5
    return (
        found == "cpp"
        and _fills_vectors(weight.shape[-4], inputs)
        and (_fills_vectors(weight.shape[-3], inputs) or has_few_channels(inputs, weight))
    )


def has_few_channels(inputs: Tensor, weight: Tensor) -> bool:
    """Whether outputs are computed from few values, of inputs that require no grad, as images."""
    return (
        not _fills_vectors(weight.shape[-3], inputs)
        and weight.shape[-3:].numel() <= _MAX_VALUES
        and not inputs.requires_grad
    )


def convolve(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry = SAME
) -> Tensor:
    """Convolution of batched tasks, channels last.

    Args:
        inputs: the inputs, of shape (tasks, n, height, width, in).
        weight: the weights, of shape (tasks, out, in, kernel height, kernel width). They are copied
            unless their memory has the order (tasks, kernel height, kernel width, in, out).
        bias: the biases, of shape (tasks, out), or None.
        geometry: kernel, stride and padding.

    Returns:
        The outputs, of shape (tasks, n, height', width', out).
    """
    bias = None if bias is None else bias.contiguous()
    return _Convolve.apply(inputs.contiguous(), weight_in_memory(weight), bias, geometry)


def weight_in_memory(weight: Tensor) -> Tensor:
    """Weights as the kernels read them: (tasks, out, in, h, w) -> (tasks, h, w, in, out)."""
    return weight.permute(0, 3, 4, 2, 1).contiguous()


def _fills_vectors(channels: int, inputs: Tensor) -> bool:
    return channels * inputs.element_size() % VECTOR_BYTES == 0


def _source(inputs: Tensor, channels: Pair, geometry: Geometry, size: Pair) -> str:
    """The C++ file for the inputs' type, the input and output channels, and the inputs' size."""
    if not _fills_vectors(channels[0], inputs):
        return _FEW_CHANNELS
    least = {1: 1}  # outputs along a dimension, by its stride
    if max(channels) <= _MAX_STRIDED_CHANNELS:
        least[2] = _MIN_STRIDED_OUTPUTS
    outputs = zip(geometry.stride, geometry.output_size(*size), strict=True)
    if (
        geometry.kernel == (3, 3)
        and max(geometry.padding) <= 1
        and all(stride in least and count >= least[stride] for stride, count in outputs)
    ):
        return _WINOGRAD
    return _DIRECT


def _call(
    function: str, inputs: Tensor, out_channels: int, geometry: Geometry, *arguments: Tensor | None
) -> None:
    """Call a function in C++ or Triton for inputs of the shape and on the device of `inputs`."""
    if inputs.is_cuda:
        from metadist.kernels import convolution_gpu  # imports Triton

        getattr(convolution_gpu, function)(*geometry, *map(in_memory, arguments))
        return
    _, _, height, width, in_channels = inputs.shape
    source = _source(inputs, (in_channels, out_channels), geometry, (height, width))
    shape = conv_shape(inputs, out_channels, geometry)
    call(source, function, inputs.dtype, shape, *arguments)


class _Convolve(Function):
    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry
    ) -> Tensor:
        size, out_channels = geometry.output_size(*inputs.shape[2:4]), weight.shape[-1]
        outputs = inputs.new_empty(*inputs.shape[:2], *size, out_channels)
        _call("convolve", inputs, out_channels, geometry, inputs, weight, bias, outputs)
        ctx.save_for_backward(inputs, weight)
        ctx.geometry = geometry
        return outputs

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        grad_output = grad_output.contiguous()
        grad_inputs = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            size = inputs.shape[2:4]
            grad_inputs = _ConvTranspose.apply(grad_output, weight, ctx.geometry, size)
        if any(ctx.needs_input_grad[1:]):
            grad_weight, grad_bias = _WeightGrad.apply(inputs, grad_output, ctx.geometry)
        return grad_inputs, grad_weight, grad_bias if ctx.needs_input_grad[2] else None, None


class _ConvTranspose(Function):
    """The transpose of `_Convolve`: maps tensors of its outputs' shape to its inputs' shape."""

    @staticmethod
    def forward(
        ctx: Any, gradient: Tensor, weight: Tensor, geometry: Geometry, size: Pair
    ) -> Tensor:
        inputs = gradient.new_empty(*gradient.shape[:2], *size, weight.shape[-2])
        arguments = (gradient, weight, inputs)
        _call("conv_transpose", inputs, gradient.shape[-1], geometry, *arguments)
        ctx.save_for_backward(gradient, weight)
        ctx.geometry = geometry
        return inputs

    @staticmethod
    def backward(ctx: Any, grad_inputs: Tensor) -> tuple[Tensor | None, ...]:
        gradient, weight = ctx.saved_tensors
        grad_inputs = grad_inputs.contiguous()
        grad_gradient = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_gradient = _Convolve.apply(grad_inputs, weight, None, ctx.geometry)
        if ctx.needs_input_grad[1]:
            grad_weight = _WeightGrad.apply(grad_inputs, gradient, ctx.geometry)[0]
        return grad_gradient, grad_weight, None, None


class _WeightGrad(Function):
    """Gradients of <gradient, convolution of the inputs> with respect to weight and bias."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, gradient: Tensor, geometry: Geometry
    ) -> tuple[Tensor, Tensor]:
        in_channels, out_channels = inputs.shape[-1], gradient.shape[-1]
        weight = inputs.new_empty(len(inputs), *geometry.kernel, in_channels, out_channels)
        bias = inputs.new_empty(len(inputs), out_channels)
        _call("weight_grad", inputs, out_channels, geometry, inputs, gradient, weight, bias)
        ctx.save_for_backward(inputs, gradient)
        ctx.geometry = geometry
        return weight, bias

    @staticmethod
    def backward(ctx: Any, grad_weight: Tensor, grad_bias: Tensor) -> tuple[Tensor | None, ...]:
        inputs, gradient = ctx.saved_tensors
        weight = grad_weight.contiguous()
        grad_inputs = grad_gradient = None
        if ctx.needs_input_grad[0]:
            size = inputs.shape[2:4]
            grad_inputs = _ConvTranspose.apply(gradient, weight, ctx.geometry, size)
        if ctx.needs_input_grad[1]:
            bias = grad_bias.contiguous()
            grad_gradient = _Convolve.apply(inputs, weight, bias, ctx.geometry)
        return grad_inputs, grad_gradient, None
