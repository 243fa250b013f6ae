"""Layers that also run several tasks side by side, each task with parameters of its own.

With parameters as they were made, these are PyTorch's layers. Parameters with one more dimension
in front (through `torch.func.functional_call`) belong to as many tasks, and the inputs then have
the same dimension in front. On small problems most of a task's time goes to starting operations,
not to arithmetic; side by side, the tasks share that cost. Each task's numbers are the same bits
however many run beside it.

The derivatives are written out in few passes over memory; they can be differentiated once more,
which is what MAML's second order needs, and no further.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function


class Linear(nn.Linear):
    """`torch.nn.Linear` on (n, in), or on (tasks, n, in) side by side."""

    def forward(self, inputs: Tensor) -> Tensor:
        """(…, n, in) -> (…, n, out)."""
        if self.weight.dim() == 2:
            return super().forward(inputs)
        outputs = inputs @ self.weight.transpose(1, 2)
        return outputs if self.bias is None else outputs + self.bias.unsqueeze(1)


class Conv2d(nn.Conv2d):
    """`torch.nn.Conv2d` on (n, channels, h, w), or on (tasks, n, channels, h, w) side by side.

    Side by side it is one matrix product a task, of the image's patches with the weights, and
    takes neither groups nor dilation, and zeros for padding.
    """

    def forward(self, maps: Tensor) -> Tensor:
        """(…, n, in, h, w) -> (…, n, out, h', w')."""
        if self.weight.dim() == 4:
            if not maps.is_cpu or torch._C._functorch.peek_interpreter_stack() is not None:
                return super().forward(maps)
            # Channels last: on CPUs convolutions and pooling are then faster.
            last = torch.channels_last
            return super().forward(maps.to(memory_format=last)).to(memory_format=last)
        tasks, n = maps.shape[:2]
        patches = _Patches.apply(
            maps.permute(0, 1, 3, 4, 2).flatten(0, 1), self.kernel_size, self.stride, self.padding
        )
        matrix = self.weight.permute(0, 1, 3, 4, 2).flatten(2).transpose(1, 2)
        rows = patches.reshape(tasks, -1, patches.shape[-1])
        outputs = (
            rows @ matrix
            if self.bias is None
            else torch.baddbmm(self.bias.unsqueeze(1), rows, matrix)
        )
        return outputs.view(tasks, n, *patches.shape[1:3], -1).permute(0, 1, 4, 2, 3)


class _Patches(Function):
    """(n, h, w, channels) -> (n, h', w', kernel · kernel · channels): what each output sees."""

    @staticmethod
    def forward(ctx: Any, maps: Tensor, kernel: Any, stride: Any, padding: Any) -> Tensor:
        ctx.geometry = maps.shape[1:3], kernel, stride, padding
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
        return _Unpatches.apply(gradient, *ctx.geometry), None, None, None


class _Unpatches(Function):
    """The transpose of `_Patches`: adds each patch up where it came from."""

    @staticmethod
    def forward(
        ctx: Any, patches: Tensor, size: Any, kernel: Any, stride: Any, padding: Any
    ) -> Tensor:
        ctx.geometry = kernel, stride, padding
        n, height, width, _ = patches.shape
        pieces = patches.unflatten(3, (*kernel, -1))
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
        return _Patches.apply(gradient.contiguous(), *ctx.geometry), None, None, None, None
