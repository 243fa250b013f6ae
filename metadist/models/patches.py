"""The patches of images that a convolution sees, so that it is one matrix product."""

import ctypes
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from metadist.kernels import call, can_call

_SOURCE = "patches"


class _Geometry(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in (
            *("images", "height", "width", "channels", "rows", "columns"),
            *("down", "across", "above", "beside"),
        )
    )

    def patches(self) -> tuple[int, ...]:
        """(n, h', w', rows · columns · channels)."""
        return (
            self.images,
            (self.height + 2 * self.above - self.rows) // self.down + 1,
            (self.width + 2 * self.beside - self.columns) // self.across + 1,
            self.rows * self.columns * self.channels,
        )


def cut_patches(maps: Tensor, kernel: Any, stride: Any, padding: Any, native: bool) -> Tensor:
    """What each output of a convolution sees. It can be differentiated any number of times.

    Args:
        maps: (n, h, w, channels).
        kernel: (rows, columns), as are stride and padding; padding is with zeros.
        stride: of the convolution.
        padding: on each side.
        native: whether to use compiled C++ where it can be.

    Returns:
        (n, h', w', rows · columns · channels).
    """
    return _Cut.apply(maps, kernel, stride, padding, native)


class _Cut(Function):
    """The patches of `cut_patches`."""

    @staticmethod
    def forward(
        ctx: Any, maps: Tensor, kernel: Any, stride: Any, padding: Any, native: bool
    ) -> Tensor:
        maps = maps.contiguous()
        ctx.size, ctx.geometry = maps.shape[1:3], (kernel, stride, padding, native)
        if native and can_call(_SOURCE, maps):
            shape = _Geometry(*maps.shape, *kernel, *stride, *padding)
            patches = maps.new_empty(shape.patches())
            call(_SOURCE, "cut", maps.dtype, shape, maps, patches)
            return patches
        (down, across), (rows, columns) = padding, kernel
        padded = F.pad(maps, (0, 0, across, across, down, down)).contiguous()
        n, height, width, channels = padded.shape
        a, b, c, d = padded.stride()
        return padded.as_strided(
            (
                n,
                (height - rows) // stride[0] + 1,
                (width - columns) // stride[1] + 1,
                rows,
                columns * channels,
            ),
            (a, b * stride[0], c * stride[1], b, d),
        ).flatten(3)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _AddUp.apply(gradient, ctx.size, *ctx.geometry), None, None, None, None


class _AddUp(Function):
    """The transpose of `_Cut`: adds each patch up where it came from."""

    @staticmethod
    def forward(
        ctx: Any, patches: Tensor, size: Any, kernel: Any, stride: Any, padding: Any, native: bool
    ) -> Tensor:
        ctx.geometry = kernel, stride, padding, native
        n, height, width, _ = patches.shape
        pieces = patches.unflatten(3, (*kernel, -1))
        if native and can_call(_SOURCE, patches):
            maps = patches.new_empty(n, *size, pieces.shape[-1])
            shape = _Geometry(*maps.shape, *kernel, *stride, *padding)
            call(_SOURCE, "add_up", patches.dtype, shape, patches.contiguous(), maps)
            return maps
        (down, across), (high, wide) = padding, size
        padded = patches.new_zeros(n, high + 2 * down, wide + 2 * across, pieces.shape[-1])
        for i in range(kernel[0]):
            rows = slice(i, i + stride[0] * (height - 1) + 1, stride[0])
            for j in range(kernel[1]):
                columns = slice(j, j + stride[1] * (width - 1) + 1, stride[1])
                padded[:, rows, columns] += pieces[:, :, :, i, j]
        return padded[:, down : down + high, across : across + wide].contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _Cut.apply(gradient, *ctx.geometry), None, None, None, None, None
