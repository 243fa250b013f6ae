"""Layers that can be batched over tasks, each task with its own parameters.

Unbatched, these compute what PyTorch's layers do, up to rounding. Batched, inputs and parameters
(replaced in a call, as by `torch.func.functional_call`) have a leading task dimension. Small tasks
spend most of their time on launching operations; batched tasks share that cost. A task's results
are bit-identical for any number of tasks in the batch.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metadist.kernels import in_transform
from metadist.kernels.batch_norm import BatchNorm, is_batch_norm
from metadist.kernels.convolution import can_convolve, convolve, geometry_of
from metadist.kernels.fused_block import can_fuse_block, fused_block
from metadist.kernels.matmul import matmul, to_autocast_dtype
from metadist.kernels.norm_relu import can_norm_relu, norm_relu_rows
from metadist.kernels.norm_relu_pool import can_fuse_norm_relu_pool, fused_norm_relu_pool
from metadist.kernels.unfold import unfold


class Linear(nn.Linear):
    """`torch.nn.Linear` for inputs (n, in), or batched (tasks, n, in).

    Args:
        args: positional arguments of `torch.nn.Linear`.
        native: whether to use C++ and Triton kernels where they are supported.
        kwargs: keyword arguments of `torch.nn.Linear`.
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
    """`torch.nn.Conv2d` for inputs (n, channels, h, w), or batched (tasks, n, channels, h, w).

    Args:
        args: positional arguments of `torch.nn.Conv2d`.
        native: whether to use C++ and Triton kernels where they are supported.
        kwargs: keyword arguments of `torch.nn.Conv2d`.

    Raises:
        ValueError: the layer has groups, dilation, a string as padding, or a padding mode other
            than zeros.
    """

    # Narrower types than in torch.nn.Conv2d, whose base class is for any number of dimensions.
    kernel_size: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]

    def __init__(self, *args: Any, native: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        plain = self.groups == 1 and self.dilation == (1, 1) and self.padding_mode == "zeros"
        if not plain or isinstance(self.padding, str):
            raise ValueError(
                "batched Conv2d supports neither groups nor dilation, and only numbers as padding "
                'with padding_mode="zeros"'
            )
        self.native = native

    def forward(self, inputs: Tensor) -> Tensor:
        """(…, n, in, h, w) -> (…, n, out, h', w')."""
        unbatched = self.weight.dim() == 4
        if self.native and can_convolve(self, inputs):
            batched, weight = to_autocast_dtype(inputs), to_autocast_dtype(self.weight)
            bias = None if self.bias is None else to_autocast_dtype(self.bias)
            if unbatched:
                batched, weight = batched.unsqueeze(0), weight.unsqueeze(0)
                bias = None if bias is None else bias.unsqueeze(0)
            channels_last = batched.permute(0, 1, 3, 4, 2)
            outputs = convolve(channels_last, weight, bias, geometry_of(self))
            outputs = outputs.permute(0, 1, 4, 2, 3)
            return outputs.squeeze(0) if unbatched else outputs
        if unbatched:
            if not inputs.is_cpu or inputs.dim() != 4 or in_transform():
                return super().forward(inputs)
            # On CPUs, convolution and pooling are faster in this memory format.
            memory_format = torch.channels_last
            outputs = super().forward(inputs.to(memory_format=memory_format))
            return outputs.to(memory_format=memory_format)
        tasks, n = inputs.shape[:2]
        columns = unfold(
            to_autocast_dtype(inputs).permute(0, 1, 3, 4, 2).flatten(0, 1),
            geometry_of(self),
            self.native,
        )
        matrix = self.weight.permute(0, 3, 4, 2, 1).flatten(1, 3)
        rows = columns.reshape(tasks, -1, columns.shape[-1])
        outputs = matmul(rows, matrix, self.bias, self.native)
        outputs = outputs.view(tasks, n, *columns.shape[1:3], self.out_channels)
        return outputs.permute(0, 1, 4, 2, 3)


def conv_block(
    convolution: nn.Conv2d, norm: nn.Module, inputs: Tensor, pool: bool = False, native: bool = True
) -> Tensor:
    """Convolution, norm, ReLU and, with `pool`, 2×2 max-pooling.

    Args:
        convolution: the convolution layer; its parameters may be batched over tasks.
        norm: see `norm_relu`.
        inputs: (…, n, channels, height, width).
        pool: whether to halve height and width, rounded down.
        native: whether to use C++ and Triton kernels where they are supported.
    """
    if (
        pool
        and native
        and type(convolution) is Conv2d
        and is_batch_norm(norm)
        and can_fuse_block(convolution, norm, inputs)
    ):
        return fused_block(convolution, norm, inputs)
    return norm_relu(norm, convolution(inputs), pool, native)


def norm_relu(norm: nn.Module, inputs: Tensor, pool: bool = False, native: bool = True) -> Tensor:
    """Norm, ReLU and, with `pool`, 2×2 max-pooling.

    Args:
        norm: batched, a `torch.nn.BatchNorm1d` or `BatchNorm2d` without running statistics, whose
            hooks are not run; unbatched, any module that keeps the shape.
        inputs: (…, n, channels, *size).
        pool: whether to halve height and width, rounded down.
        native: whether to use C++ and Triton kernels where they are supported.

    Raises:
        ValueError: there is a single value per channel.
    """
    if (
        native
        and can_fuse_norm_relu_pool(norm, inputs)
        and not (pool and min(inputs.shape[-2:]) < 2)
    ):
        return fused_norm_relu_pool(norm, inputs, pool)
    if can_norm_relu(norm, inputs):
        out = _norm_relu(norm, inputs.unsqueeze(0)).squeeze(0)
    elif is_batch_norm(norm) and norm.weight is not None and norm.weight.dim() == 2:
        out = _norm_relu(norm, inputs)
    else:
        if is_batch_norm(norm) and inputs.is_cpu and (norm.training or norm.running_mean is None):
            inputs = inputs.contiguous()  # channels last, PyTorch's statistics are less accurate
        out = F.relu(norm(inputs))
    if not pool:
        return out
    return F.max_pool2d(out.flatten(0, -4), 2).unflatten(0, out.shape[:-3])


def _norm_relu(norm: BatchNorm, inputs: Tensor) -> Tensor:
    """Batch norm and ReLU of (tasks, n, channels, *size), unbatched for one task."""
    channels_last = inputs.movedim(2, -1)
    if channels_last[0, ..., 0].numel() == 1:
        raise ValueError(
            f"batch norm needs more than one value per channel, got {tuple(inputs.shape)}"
        )
    weight = norm.weight.view(len(inputs), 1, norm.weight.shape[-1])
    bias = torch.zeros_like(weight) if norm.bias is None else norm.bias.view_as(weight)
    # As under autocast, statistics have the type of the weight.
    dtype = torch.promote_types(inputs.dtype, weight.dtype)
    rows = channels_last.flatten(1, -2).to(dtype)
    tracking = norm if norm.weight.dim() == 1 else None
    out = norm_relu_rows(rows, weight, bias, norm.eps, tracking)
    return out.view(channels_last.shape).movedim(-1, 2)
