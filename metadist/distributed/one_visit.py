"""Derivatives that came home with the value, as a node of the caller's autograd graph."""

from typing import Any

import optree
import torch
from torch import Tensor

from metadist.distributed.visits import Gradients


class _KnownGradients(torch.autograd.Function):
    """A scalar whose first derivatives are known: backward scales them."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: list[Tensor | None], *inputs: Tensor) -> Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [None if g is None else g * outer.to(g.device) for g in ctx.gradients]
        return None, None, *scaled


def attach_gradients(result: Any, gradients: Gradients | None, inputs: list[Tensor]) -> Any:
    """The result with its scalar made a differentiable function of `inputs`.

    Args:
        result: what a visit answered; its tensors have no graph.
        gradients: the derivative of one scalar in it, or None: then nothing is attached.
        inputs: the caller's tensors, in the order of `gradients.by_input`.
    """
    if gradients is None:
        return result
    leaves, structure = optree.tree_flatten(result, none_is_leaf=True)
    leaves[gradients.leaf] = _KnownGradients.apply(
        leaves[gradients.leaf], gradients.by_input, *inputs
    )
    return optree.tree_unflatten(structure, leaves)
