"""Layers that can be batched over tasks, each task with its own parameters.

Unbatched, these compute what PyTorch's layers do, up to rounding. Batched, inputs and parameters
(replaced in a call, as by `torch.func.functional_call`) have a leading task dimension. Small tasks
spend most of their time on launching operations; batched tasks share that cost. A task's results
are bit-identical for any number of tasks in the batch.
"""

from typing import Any, TypeGuard, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from metadist.kernels import in_transform
from metadist.kernels.convolution import Geometry, can_convolve, convolve
from metadist.kernels.fused_block import can_fuse_block, fused_block
from metadist.kernels.matmul import matmul, to_autocast_dtype
from metadist.kernels.norm_relu import norm_relu_rows
from metadist.kernels.norm_relu_pool import (
    MIN_ELEMENTS,
    NormBackend,
    norm_backend,
    norm_relu_pool,
)
from metadist.kernels.unfold import unfold

BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d

_DIMENSIONS = {nn.BatchNorm1d: (1, 2), nn.BatchNorm2d: (3,)}
"""How many more dimensions than the weight a norm's inputs may have."""


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


def has_unbatched_linear(module: nn.Module) -> bool:
    """Whether a module is or holds a linear layer that takes one weight, not one per task, such as
    `torch.nn.Linear`.

    Args:
        module: the module, such as a head that replaced the model's own.
    """
    return any(
        isinstance(layer, nn.Linear) and not isinstance(layer, Linear) for layer in module.modules()
    )


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
        weight, bias, geometry = self.weight, self.bias, self.geometry
        unbatched = weight.dim() == 4
        if self.native and can_convolve(inputs, weight, bias, geometry):
            batched, weight = to_autocast_dtype(inputs), to_autocast_dtype(weight)
            bias = None if bias is None else to_autocast_dtype(bias)
            if unbatched:
                batched, weight = batched.unsqueeze(0), weight.unsqueeze(0)
                bias = None if bias is None else bias.unsqueeze(0)
            channels_last = batched.permute(0, 1, 3, 4, 2)
            outputs = convolve(channels_last, weight, bias, geometry).permute(0, 1, 4, 2, 3)
            return outputs.squeeze(0) if unbatched else outputs
        if unbatched:
            if not inputs.is_cpu or inputs.dim() != 4 or in_transform():
                return super().forward(inputs)
            # On CPUs, convolution and pooling are faster in this memory format.
            memory_format = torch.channels_last
            outputs = super().forward(inputs.to(memory_format=memory_format))
            return outputs.to(memory_format=memory_format)
        tasks, n = inputs.shape[:2]
        images = to_autocast_dtype(inputs).permute(0, 1, 3, 4, 2).flatten(0, 1)
        columns = unfold(images, geometry, self.native)
        matrix = weight.permute(0, 3, 4, 2, 1).flatten(1, 3)
        columns = columns.unflatten(0, (tasks, n))
        outputs = matmul(columns.flatten(1, 3), matrix, bias, self.native)
        outputs = outputs.view(*columns.shape[:-1], self.out_channels)
        return outputs.permute(0, 1, 4, 2, 3)

    @property
    def geometry(self) -> Geometry:
        """The weight's kernel size, stride and padding."""
        height, width = self.weight.shape[-2:]
        return Geometry((height, width), self.stride, self.padding)


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
    if pool and native and type(convolution) is Conv2d and type(norm) is nn.BatchNorm2d:
        tensors = inputs, convolution.weight, convolution.bias, norm.weight, norm.bias
        if (
            can_fuse_block(*tensors, convolution.geometry)
            and not _has_hooks(convolution)
            and _is_plain(norm)
        ):
            unbatched = inputs.dim() == 4
            given = cast(tuple[Tensor, ...], tensors)  # none is None: see `can_fuse_block`
            batched = (tensor.unsqueeze(0) if unbatched else tensor for tensor in given)
            out, *statistics = fused_block(*batched, eps=float(norm.eps))
            _update_running_statistics(norm, *statistics)
            return out.squeeze(0) if unbatched else out
    return norm_relu(norm, convolution(inputs), pool, native)


def norm_relu(norm: nn.Module, inputs: Tensor, pool: bool = False, native: bool = True) -> Tensor:
    """Norm, ReLU and, with `pool`, 2×2 max-pooling.

    Args:
        norm: batched, a `torch.nn.BatchNorm1d` or `BatchNorm2d` with a weight and without running
            statistics, whose hooks are not run; unbatched, any module that keeps the shape.
        inputs: (…, n, channels, *size).
        pool: whether to halve height and width, rounded down.
        native: whether to use C++ and Triton kernels where they are supported.

    Raises:
        ValueError: there is a single value per channel, or a `BatchNorm1d` without weight and
            running statistics has inputs of three dimensions.
    """
    backend = _norm_backend(norm, inputs, pool, native)
    if backend is None:
        if (
            type(norm) is nn.BatchNorm1d
            and norm.weight is None
            and norm.running_mean is None
            and inputs.dim() == 3
        ):
            raise ValueError(
                "a BatchNorm1d without weight cannot tell whether its inputs of shape "
                f"{tuple(inputs.shape)} are batched over tasks: use affine=True"
            )
        if _is_batch_norm(norm) and inputs.is_cpu and (norm.training or norm.running_mean is None):
            inputs = inputs.contiguous()  # channels last, PyTorch's statistics are less accurate
        out = F.relu(norm(inputs))
    else:
        out = _norm_relu(cast(BatchNorm, norm), inputs, pool, backend)
    if not pool or backend in ("cpp", "triton"):
        return out
    return F.max_pool2d(out.flatten(0, -4), 2).unflatten(0, out.shape[:-3])


def _norm_backend(norm: nn.Module, inputs: Tensor, pool: bool, native: bool) -> NormBackend | None:
    """How to compute a norm; None for its own `forward`."""
    if not _is_batch_norm(norm) or (weight := norm.weight) is None:
        return None
    found: NormBackend | None = None
    if (
        _is_plain(norm)
        and inputs.dim() - weight.dim() in _DIMENSIONS[type(norm)]
        and (norm.running_mean is None or inputs.numel() >= MIN_ELEMENTS)
    ):
        found = norm_backend(inputs, weight, norm.bias, 2 if pool else 1, native)
    return found or ("torch" if weight.dim() == 2 else None)


def _is_batch_norm(module: nn.Module) -> TypeGuard[BatchNorm]:
    """Whether a module is a batch norm of PyTorch and not a subclass, which may differ."""
    return type(module) in _DIMENSIONS


def _is_plain(norm: BatchNorm) -> bool:
    """Whether a batch norm has no hooks and normalizes with the statistics of the batch.

    It may keep running statistics if it is not batched over tasks.
    """
    if norm.running_mean is None:
        of_batch = norm.running_var is None
    else:
        of_batch = norm.training and norm.running_var is not None and norm.weight.dim() == 1
    return of_batch and norm.eps > 0 and not _has_hooks(norm)


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _has_hooks(module: nn.Module) -> bool:
    """Whether forward or backward hooks are called for the module."""
    return any(vars(module)[hooks] for hooks in _HOOKS) or bool(_has_any_global_hook())


def _update_running_statistics(
    norm: BatchNorm, mean: Tensor | None, unbiased_variance: Tensor | None
) -> None:
    """Update a norm's running statistics, if it has them, as PyTorch does.

    Args:
        norm: the norm, not batched.
        mean: the mean of its inputs, with one element per channel; not None if the norm is on a
            CPU.
        unbiased_variance: their variance, likewise.
    """
    if norm.running_mean is None or not norm.track_running_stats:
        return
    assert norm.running_var is not None and mean is not None and unbiased_variance is not None
    momentum = norm.momentum
    if norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
        if momentum is None:  # a cumulative average
            momentum = 1 / float(norm.num_batches_tracked)
    # By `.data`: PyTorch's own norm of an earlier call has saved them for its backward pass, which
    # does not read them after a forward pass in training.
    norm.running_mean.data.lerp_(mean.view(-1), momentum or 0.0)
    norm.running_var.data.lerp_(unbiased_variance.view(-1), momentum or 0.0)


def _norm_relu(norm: BatchNorm, inputs: Tensor, pool: bool, backend: NormBackend) -> Tensor:
    """Batch norm and ReLU of (…, n, channels, *size), with pooling in C++ and Triton."""
    unbatched = norm.weight.dim() == 1
    channels_last = (inputs.unsqueeze(0) if unbatched else inputs).movedim(2, -1)
    tasks, n, *size, channels = channels_last.shape
    if channels_last.shape[1:-1].numel() == 1:
        raise ValueError(
            f"batch norm needs more than one value per channel, got {tuple(inputs.shape)}"
        )
    mean: Tensor | None
    variance: Tensor | None
    if backend == "torch":
        # As under autocast, statistics have the type of the weight.
        dtype = torch.promote_types(inputs.dtype, norm.weight.dtype)
        rows = channels_last.flatten(1, -2).to(dtype)
        weight = norm.weight.view(tasks, 1, channels)
        bias = torch.zeros_like(weight) if norm.bias is None else norm.bias.view_as(weight)
        out, mean, variance = norm_relu_rows(rows, weight, bias, norm.eps)
        out = out.view(channels_last.shape)
    else:
        images = channels_last.reshape(tasks, n, *[1] * (2 - len(size)), *size, channels)
        weight, bias = (p.unsqueeze(0) if unbatched else p for p in (norm.weight, norm.bias))
        window = 2 if pool else 1
        out, mean, variance = norm_relu_pool(images, weight, bias, float(norm.eps), window)
        out = out if pool else out.view(channels_last.shape)
    if unbatched:
        _update_running_statistics(norm, mean, variance)
    out = out.movedim(-1, 2)
    return out.squeeze(0) if unbatched else out
