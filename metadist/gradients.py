"""Values whose gradients were computed elsewhere: explicitly, or by another process."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor


class _KnownGradients(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, value: Tensor, gradients: Sequence[Tensor | None], *inputs: Tensor
    ) -> Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(_scale(gradient, outer) for gradient in ctx.gradients)


def _scale(gradient: Tensor | None, outer: Tensor) -> Tensor | None:
    if gradient is None:
        return None
    shape = (*outer.shape, *(1,) * (gradient.dim() - outer.dim()))
    return gradient * outer.view(shape).to(gradient)


def with_gradients(
    value: Tensor, inputs: Sequence[Tensor], gradients: Sequence[Tensor | None]
) -> Tensor:
    """The given value as a differentiable function of `inputs`, with known first derivatives.

    Args:
        value: scalar; or of shape (tasks,), each task's value a function of its part of the inputs,
            which then have the same first dimension.
        inputs: the tensors that the value depends on.
        gradients: for each input one of the same shape, or None where the value does not depend
            on it.
    """
    detached = [None if each is None else each.detach() for each in gradients]
    return cast(Tensor, _KnownGradients.apply(value.detach(), detached, *inputs))
