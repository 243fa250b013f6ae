"""What the implementations of batch norm have in common: conditions and running statistics."""

from typing import TypeGuard, cast

from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d

MIN_ELEMENTS = 2**15
"""The size of the inputs from which PyTorch's norm is slower than `norm_relu` for a single task."""

_DIMENSIONS = {nn.BatchNorm1d: (1, 2), nn.BatchNorm2d: (3,)}
"""How many more dimensions than the weight a norm's inputs may have."""


def is_batch_norm(module: nn.Module) -> TypeGuard[BatchNorm]:
    """Whether a module is a batch norm of PyTorch and not a subclass, which may differ."""
    return type(module) in _DIMENSIONS


def is_supported(module: nn.Module) -> TypeGuard[BatchNorm]:
    """Whether a module is a batch norm that `norm_relu` or a kernel may compute.

    It has a weight and no hooks, and normalizes with the statistics of the batch. Running
    statistics are supported if the norm is not batched over tasks.

    Args:
        module: a module; the parameters of a batch norm may be batched over tasks.
    """
    return (
        is_batch_norm(module)
        and not has_hooks(module)
        and module.weight is not None
        and module.weight.shape[-1] == module.num_features
        and (module.bias is None or module.bias.shape == module.weight.shape)
        and _uses_batch_statistics(module)
    )


def _uses_batch_statistics(norm: BatchNorm) -> bool:
    """Whether a norm normalizes with the statistics of the batch; it may keep running ones."""
    if norm.eps <= 0:
        return False  # PyTorch's error
    if norm.running_mean is None:
        return norm.running_var is None
    return norm.training and norm.running_var is not None and norm.weight.dim() == 1


def fits(norm: BatchNorm, inputs: Tensor) -> bool:
    """Whether inputs have a shape that a norm takes, with more than one value per channel.

    Args:
        norm: a norm for which `is_supported` holds.
        inputs: the inputs, of shape (n, channels, *size) or, batched, (tasks, n, channels, *size).
    """
    before = norm.weight.dim()
    tasks = 1 if before == 1 else len(norm.weight)
    return (
        inputs.dim() - before in _DIMENSIONS[type(norm)]
        and inputs.shape[before] == norm.num_features
        and (before == 1 or len(inputs) == tasks)
        and inputs.numel() // (tasks * norm.num_features) > 1
    )


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_hooks(module: nn.Module) -> bool:
    """Whether forward or backward hooks are called for the module."""
    return any(vars(module)[hooks] for hooks in _HOOKS) or bool(_has_any_global_hook())


def tracks_statistics(norm: BatchNorm | None) -> TypeGuard[BatchNorm]:
    """Whether a norm that normalizes with the statistics of the batch updates running ones."""
    return norm is not None and norm.track_running_stats and norm.running_mean is not None


def update_running_statistics(norm: BatchNorm, mean: Tensor, unbiased_variance: Tensor) -> None:
    """Update a norm's running statistics as PyTorch does.

    Args:
        norm: the norm, not batched, for which `tracks_statistics` holds.
        mean: the mean of its inputs, of any shape with one element per channel.
        unbiased_variance: their variance, of the same shape.
    """
    momentum = norm.momentum
    if norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
        if momentum is None:  # a cumulative average
            momentum = 1 / float(norm.num_batches_tracked)
    # By `.data`: PyTorch's own norm of an earlier call has saved them for its backward pass, which
    # does not read them after a forward pass in training.
    cast(Tensor, norm.running_mean).data.lerp_(mean.view(-1), momentum or 0.0)
    cast(Tensor, norm.running_var).data.lerp_(unbiased_variance.view(-1), momentum or 0.0)
