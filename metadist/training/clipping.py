"""The norm of a gradient, and its clipping."""

from collections.abc import Sequence

import torch
from torch import nn

from metadist.training.experiment import TrainerConfig


def optimized_parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """The parameters that an optimizer changes."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def gradient_norm(parameters: Sequence[nn.Parameter]) -> float:
    """The Euclidean norm of all gradients together, computed in float64.

    For gradients of float32 or narrower types, it is infinite or NaN only if an element is.
    """
    # As one vector, a copy, since norms of many small gradients would take three times as long.
    gradients = [p.grad.flatten() for p in parameters if p.grad is not None]
    return torch.linalg.vector_norm(torch.cat(gradients).double()).item() if gradients else 0.0


def clip_gradient(parameters: Sequence[nn.Parameter], config: TrainerConfig, norm: float) -> None:
    """Clip the gradients in place by `trainer.clip_value`, then by `trainer.clip_norm`.

    Args:
        parameters: the parameters whose gradients are clipped.
        config: the trainer's configuration.
        norm: the norm of the gradients, see `gradient_norm`.
    """
    if config.clip_value is not None:
        torch.nn.utils.clip_grad_value_(parameters, config.clip_value)
        norm = gradient_norm(parameters)
    if config.clip_norm is not None:
        total = torch.tensor(norm, dtype=torch.float64)
        torch.nn.utils.clip_grads_with_norm_(parameters, config.clip_norm, total)
