"""Derivatives that came home with the value, as a node of the caller's autograd graph."""

from collections.abc import Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from metadist.distributed.reducers import finish_sum, weighted_sum
from metadist.distributed.visits import Answer, Gradients


class _KnownGradients(torch.autograd.Function):
    """A scalar whose first derivatives are known: backward scales them."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: list[Tensor | None], *inputs: Tensor) -> Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [None if g is None else g * outer.to(g) for g in ctx.gradients]
        return None, None, *scaled


def attach(answer: Answer, inputs: Sequence[Tensor]) -> Any:
    """An answer's value, its scalar made a differentiable function of the caller's `inputs`.

    Args:
        answer: what a visit brought for one shard.
        inputs: the caller's tensors, in the order of the answer's gradients.
    """
    if answer.gradients is None:
        return answer.value
    place, by_input = answer.gradients
    leaves, structure = optree.tree_flatten(answer.value, none_is_leaf=True)
    gradients = [
        None if gradient is None else gradient.to(tensor)
        for gradient, tensor in zip(by_input, inputs, strict=True)
    ]
    leaves[place] = _KnownGradients.apply(leaves[place], gradients, *inputs)
    return optree.tree_unflatten(structure, leaves)


def attach_sum(
    partial: Sequence[Answer], inputs: Sequence[Sequence[Tensor]], divisor: float | None
) -> Any:
    """The sum of the workers' partial sums, divided once, differentiable by the inputs of all.

    Args:
        partial: each worker's sum.
        inputs: the caller's tensors of each worker's visit; empty where nothing is
            differentiated. A tensor that several workers got counts once, with all their parts.
        divisor: what the sum is divided by; None for a sum.
    """
    assert partial[0].dtypes is not None
    ones = [1] * len(partial)
    total_value = weighted_sum([answer.value for answer in partial], ones)
    value = finish_sum(total_value, divisor, partial[0].dtypes)
    leaf: int | None = None
    tensors: dict[int, Tensor] = {}
    total: dict[int, Tensor] = {}
    for answer, given in zip(partial, inputs, strict=True):
        if answer.gradients is None:
            continue
        leaf = answer.gradients.leaf
        for gradient, tensor in zip(answer.gradients.by_input, given, strict=True):
            if gradient is not None:
                tensors[id(tensor)] = tensor
                so_far = total.get(id(tensor))
                total[id(tensor)] = gradient if so_far is None else so_far + gradient
    if leaf is None:
        return value
    gradients = Gradients(leaf, [total[key] / (divisor or 1) for key in tensors])
    return attach(Answer(value, gradients), list(tensors.values()))
