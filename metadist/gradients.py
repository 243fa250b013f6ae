"""The tensors of a structure, and values whose gradients were computed elsewhere: explicitly, or by
another process.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import optree
import torch
from torch import Tensor, nn


def tensors_of(tree: Any) -> list[Tensor]:
    """Every distinct tensor in a structure, in an order that pickling preserves.

    Modules count with their parameters, not the buffers, and dataclasses with their fields.
    """
    found: dict[int, Tensor] = {}
    visited: set[int] = set()
    leaves = optree.tree_leaves(tree, none_is_leaf=True)[::-1]
    while leaves:
        leaf = leaves.pop()
        if isinstance(leaf, Tensor):
            found.setdefault(id(leaf), leaf)
        elif id(leaf) in visited:  # often the same module in every call
            continue
        elif isinstance(leaf, nn.Module):
            visited.add(id(leaf))
            for parameter in leaf.parameters():
                found.setdefault(id(parameter), parameter)
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            visited.add(id(leaf))
            fields: Any = [getattr(leaf, field.name, None) for field in dataclasses.fields(leaf)]
            leaves += optree.tree_leaves(fields, none_is_leaf=True)[::-1]
    return list(found.values())


class _KnownGradients(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, value: Tensor, gradients: Sequence[Tensor | None], *inputs: Tensor
    ) -> Tensor:
        ctx.gradients, ctx.inputs = gradients, inputs
        return value.clone()

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.gradients
        if torch.is_grad_enabled():  # the gradients would count as constants
            gradients = [
                None if each is None else _FirstDerivative.apply(each, *ctx.inputs)
                for each in gradients
            ]
        return None, None, *(_scale(gradient, outer) for gradient in gradients)


class _FirstDerivative(torch.autograd.Function):
    """A first derivative whose own derivative is not known."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *inputs: Tensor) -> Tensor:
        return gradient.clone()

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        raise RuntimeError(
            'a gradient that was computed elsewhere, as with gradient="worker", cannot be '
            "differentiated: compute what needs its derivative in the function that runs on the "
            "workers."
        )


def _scale(gradient: Tensor | None, outer: Tensor) -> Tensor | None:
    if gradient is None:
        return None
    shape = (*outer.shape, *(1,) * (gradient.dim() - outer.dim()))
    return gradient * outer.view(shape).to(gradient)


def with_gradients(
    value: Tensor, inputs: Sequence[Tensor], gradients: Sequence[Tensor | None]
) -> Tensor:
    """The given value as a differentiable function of `inputs`, with known first derivatives. To
    differentiate these raises a RuntimeError.

    Args:
        value: scalar; or of shape (tasks,), each task's value a function of its part of the inputs,
            which then have the same first dimension.
        inputs: the tensors that the value depends on.
        gradients: for each input one of the same shape, or None where the value does not depend
            on it.
    """
    detached = [None if each is None else each.detach() for each in gradients]
    return cast(Tensor, _KnownGradients.apply(value.detach(), detached, *inputs))
