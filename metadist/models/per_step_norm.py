"""Batch norm with weights and statistics for each inner step (MAML++, arXiv 1810.09502)."""

import copy

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class PerStepNorm(nn.Module):
    """Several copies of a batch norm, of which the one of the current step is used.

    The features of a network change from inner step to inner step; a norm for each of them has
    scales, shifts and, where it keeps them, running statistics that fit.

    Args:
        norm: what to copy.
        steps: how many copies.

    Attributes:
        step: whose norm is used, from 0; beyond the last one, the last. Whoever runs the network
            sets it first.
    """

    def __init__(self, norm: _BatchNorm, steps: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(copy.deepcopy(norm) for _ in range(steps))
        self.step = 0

    def forward(self, inputs: Tensor) -> Tensor:
        """Normalise as the current step's norm does."""
        return self.norms[min(self.step, len(self.norms) - 1)](inputs)


def give_norms_steps(model: nn.Module, steps: int) -> list[str]:
    """Replace each batch norm of a model by a `PerStepNorm`, in place.

    Returns:
        The names of the replaced modules within the model.
    """
    names = [name for name, module in model.named_modules() if isinstance(module, _BatchNorm)]
    for name in names:
        parent, _, child = name.rpartition(".")
        norm = PerStepNorm(model.get_submodule(name), steps)
        setattr(model.get_submodule(parent), child, norm)
    return names
