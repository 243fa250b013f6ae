"""Layers that also run several tasks side by side, each task with parameters of its own.

With parameters as they were made, these are PyTorch's layers. Parameters with one more dimension
in front (through `torch.func.functional_call`) belong to as many tasks, and the inputs then have
the same dimension in front. On small problems most of a task's time goes to starting operations,
not to arithmetic; side by side, the tasks share that cost. Each task's numbers are the same bits
however many run beside it.
"""

from typing import Any

import torch
from torch import Tensor, nn

from metadist.kernels import in_transform
from metadist.models.convolution import can_convolve, convolve
from metadist.models.matmul import matmul
from metadist.models.patches import cut_patches


class Linear(nn.Linear):
    """`torch.nn.Linear` on (n, in), or on (tasks, n, in) side by side.

    Args:
        args: as of `torch.nn.Linear`.
        native: whether to use compiled C++ side by side where it can be.
        kwargs: as of `torch.nn.Linear`.
    """

    def __init__(self, *args: Any, native: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.native = native

    def forward(self, inputs: Tensor) -> Tensor:
        """(…, n, in) -> (…, n, out)."""
        if self.weight.dim() == 2:
            return super().forward(inputs)
        return matmul(inputs, self.weight.mT, self.bias, self.native)


class Conv2d(nn.Conv2d):
    """`torch.nn.Conv2d` on (n, channels, h, w), or on (tasks, n, channels, h, w) side by side.

    Side by side it is one matrix product a task, of the image's patches with the weights.

    Args:
        args: as of `torch.nn.Conv2d`.
        native: whether to use compiled C++ side by side where it can be.
        kwargs: as of `torch.nn.Conv2d`.

    Raises:
        ValueError: groups, dilation, padding by a word or with anything but zeros.
    """

    def __init__(self, *args: Any, native: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        plain = self.groups == 1 and self.dilation == (1, 1) and self.padding_mode == "zeros"
        if not plain or isinstance(self.padding, str):
            raise ValueError("Conv2d side by side takes no groups, no dilation, padding in zeros")
        self.native = native

    def forward(self, maps: Tensor) -> Tensor:
        """(…, n, in, h, w) -> (…, n, out, h', w')."""
        alone = self.weight.dim() == 4
        if self.native and can_convolve(self, maps):
            parts = maps, self.weight, self.bias
            if alone:
                parts = (None if part is None else part.unsqueeze(0) for part in parts)
            together, weight, bias = parts
            outputs = convolve(together.permute(0, 1, 3, 4, 2), weight, bias)
            outputs = outputs.permute(0, 1, 4, 2, 3)
            return outputs.squeeze(0) if alone else outputs
        if alone:
            if not maps.is_cpu or in_transform():
                return super().forward(maps)
            # Channels last: on CPUs convolutions and pooling are then faster.
            last = torch.channels_last
            return super().forward(maps.to(memory_format=last)).to(memory_format=last)
        tasks, n = maps.shape[:2]
        patches = cut_patches(
            maps.permute(0, 1, 3, 4, 2).flatten(0, 1),
            self.kernel_size,
            self.stride,
            self.padding,
            self.native,
        )
        matrix = self.weight.permute(0, 1, 3, 4, 2).flatten(2).mT
        rows = patches.reshape(tasks, -1, patches.shape[-1])
        outputs = matmul(rows, matrix, self.bias, self.native)
        return outputs.view(tasks, n, *patches.shape[1:3], -1).permute(0, 1, 4, 2, 3)
