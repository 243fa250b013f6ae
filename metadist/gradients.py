"""The tensors of a structure, and values whose gradients were computed in advance, in this
process or another one.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import optree
import torch
from torch import Tensor, nn


def tensors_of(tree: Any) -> list[Tensor]:
    """Every distinct tensor in a structure, in an order that pickling preserves.

    For a module these are its parameters, not its buffers; for a dataclass, those in its fields.
    """
    tensors: dict[int, Tensor] = {}
    visited: set[int] = set()
    leaves = optree.tree_leaves(tree, none_is_leaf=True)[::-1]
    while leaves:
        leaf = leaves.pop()
        if isinstance(leaf, Tensor):
            tensors.setdefault(id(leaf), leaf)
        elif id(leaf) in visited:  # often the same module in every call
            continue
        elif isinstance(leaf, nn.Module):
            visited.add(id(leaf))
            for parameter in leaf.parameters():
                tensors.setdefault(id(parameter), parameter)
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            visited.add(id(leaf))
            fields: Any = [getattr(leaf, field.name, None) for field in dataclasses.fields(leaf)]
            leaves += optree.tree_leaves(fields, none_is_leaf=True)[::-1]
    return list(tensors.values())


class _KnownGradients(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, value: Tensor, gradients: Sequence[Tensor | None], *inputs: Tensor
    ) -> Tensor:
        ctx.save_for_backward(*gradients)  # freed by a backward pass, like any graph
        ctx.inputs = inputs
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradients would count as constants
            gradients = [
                None if gradient is None else _FirstDerivative.apply(gradient, *ctx.inputs)
                for gradient in gradients
            ]
        return None, None, *(_scale(gradient, grad_output) for gradient in gradients)


class _FirstDerivative(torch.autograd.Function):
    """A first derivative whose own derivative is not known."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *inputs: Tensor) -> Tensor:
        return gradient.clone()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        raise RuntimeError(
            'a gradient that was computed elsewhere, as with gradient="worker", cannot be '
            "differentiated: compute what needs its derivative in the function that runs on the "
            "workers."
        )


def _scale(gradient: Tensor | None, factor: Tensor) -> Tensor | None:
    if gradient is None:
        return None
    shape = (*factor.shape, *(1,) * (gradient.dim() - factor.dim()))
    return gradient * factor.view(shape).to(gradient)


def with_gradients(
    value: Tensor, inputs: Sequence[Tensor], gradients: Sequence[Tensor | None]
) -> Tensor:
    """Make a value a differentiable function of `inputs`, with known first derivatives.
    Differentiating these derivatives raises a RuntimeError.

    Args:
        value: a scalar, or a tensor of shape (tasks,) in which each task's value depends on its
            part of the inputs; the inputs then have the same first dimension.
        inputs: the tensors that the value depends on.
        gradients: the gradient of each input, with the input's shape; None where the value does
            not depend on the input.
    """
    detached = [None if gradient is None else gradient.detach() for gradient in gradients]
    return cast(Tensor, _KnownGradients.apply(value.detach(), detached, *inputs))
