"""Unfold (im2col) and fold (col2im), channels last."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from metadist.kernels.convolution import Geometry, Pair, conv_shape
from metadist.kernels.loader import backend, call

_SOURCE = "unfold"


def unfold(inputs: Tensor, geometry: Geometry, native: bool) -> Tensor:
    """The patch of inputs of each output of a convolution; differentiable any number of times.

    Args:
        inputs: the inputs, of shape (n, h, w, channels).
        geometry: kernel, stride and padding; the kernel is not larger than the padded inputs.
        native: whether to use C++ where it is supported.

    Returns:
        The patches, of shape (n, h', w', kernel height · kernel width · channels).
    """
    return _Unfold.apply(inputs, geometry, native)


class _Unfold(Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, geometry: Geometry, native: bool) -> Tensor:
        inputs = inputs.contiguous()
        ctx.size, ctx.arguments = inputs.shape[1:3], (geometry, native)
        n, height, width, channels = inputs.shape
        kernel, stride, padding = geometry
        out_height, out_width = geometry.output_size(height, width)
        if out_height < 1 or out_width < 1:
            raise RuntimeError(
                f"a kernel of {kernel[0]}×{kernel[1]} is larger than the inputs of "
                f"{height}×{width} with padding {padding[0]}×{padding[1]}"
            )
        if native and backend(inputs) == "cpp":
            columns = inputs.new_empty(n, out_height, out_width, kernel[0] * kernel[1] * channels)
            shape = conv_shape(inputs.unsqueeze(0), columns.shape[-1], geometry)
            call(_SOURCE, "unfold", inputs.dtype, shape, inputs, columns)
            return columns
        padded = F.pad(inputs, (0, 0, padding[1], padding[1], padding[0], padding[0])).contiguous()
        # Not `padded.stride()`, in which the steps of dimensions of one element are arbitrary.
        step_h, step_w, step_c = padded.shape[2] * channels, channels, 1
        step_n = padded.shape[1] * step_h
        return padded.as_strided(
            (n, out_height, out_width, kernel[0], kernel[1] * channels),
            (step_n, step_h * stride[0], step_w * stride[1], step_h, step_c),
        ).flatten(3)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return _Fold.apply(grad_output, ctx.size, *ctx.arguments), None, None


class _Fold(Function):
    """The transpose of `_Unfold`: sums overlapping patches."""

    @staticmethod
    def forward(ctx: Any, columns: Tensor, size: Pair, geometry: Geometry, native: bool) -> Tensor:
        ctx.arguments = geometry, native
        kernel, stride, padding = geometry
        n, out_height, out_width, _ = columns.shape
        patches = columns.unflatten(3, (*kernel, -1))
        if native and backend(columns) == "cpp":
            images = columns.new_empty(n, *size, patches.shape[-1])
            shape = conv_shape(images.unsqueeze(0), columns.shape[-1], geometry)
            call(_SOURCE, "fold", columns.dtype, shape, columns.contiguous(), images)
            return images
        (height, width), (pad_h, pad_w) = size, padding
        padded = columns.new_zeros(n, height + 2 * pad_h, width + 2 * pad_w, patches.shape[-1])
        for row in range(kernel[0]):
            rows = slice(row, row + stride[0] * (out_height - 1) + 1, stride[0])
            for column in range(kernel[1]):
                cols = slice(column, column + stride[1] * (out_width - 1) + 1, stride[1])
                padded[:, rows, cols] += patches[:, :, :, row, column]
        return padded[:, pad_h : pad_h + height, pad_w : pad_w + width].contiguous()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return _Unfold.apply(grad_output, *ctx.arguments), None, None, None
