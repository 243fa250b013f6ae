"""Distributed autograd: derivatives through remote calls, in the words of `torch.autograd`.

The calling rank opens a context around forward and backward. A context is not thread-safe.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import autograd as dist_autograd

__all__ = ["backward", "context", "get_gradients", "grad", "grads"]

context = dist_autograd.context
"""Context manager around a forward and its backward pass; it yields the context's number."""


def get_gradients(context_id: int) -> dict[Tensor, Tensor]:
    """The gradients that backward passes left in the context, for this worker's leaf tensors.

    Args:
        context_id: the number that `context()` yielded.
    """
    return dist_autograd.get_gradients(context_id)


def backward(
    context_id: int, tensors: Tensor | Sequence[Tensor], retain_graph: bool = False
) -> None:
    """The backward pass through all workers; adds to `.grad` of this worker's leaf tensors.

    Other workers' leaves keep their gradients in the context.

    Args:
        context_id: the number that `context()` yielded.
        tensors: the scalars to differentiate.
        retain_graph: keep the graph for another backward pass in this context.
    """
    roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    before = dict(get_gradients(context_id))
    before = {leaf: gradient.clone() for leaf, gradient in before.items()}
    dist_autograd.backward(context_id, roots, retain_graph)
    with torch.no_grad():
        for leaf, gradient in get_gradients(context_id).items():
            # The context sums over its backward passes: only what this one added is new.
            new = gradient - before[leaf] if leaf in before else gradient.clone()
            leaf.grad = new if leaf.grad is None else leaf.grad + new


def grad(
    context_id: int,
    outputs: Tensor | Sequence[Tensor],
    inputs: Tensor | Sequence[Tensor],
    retain_graph: bool = False,
    allow_unused: bool = False,
) -> tuple[Tensor | None, ...]:
    """The gradients of scalars by this worker's leaf tensors; `.grad` stays as it is.

    Args:
        context_id: the number that `context()` yielded.
        outputs: the scalars to differentiate.
        inputs: leaf tensors of this worker, or an iterable of them (`model.parameters()`).
        retain_graph: keep the graph for another backward pass in this context.
        allow_unused: give None for inputs that the outputs do not depend on, instead of raising.

    Returns:
        A gradient for each input.

    Raises:
        RuntimeError: an input that the outputs do not depend on, without `allow_unused`.
    """
    roots = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    leaves = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    before = {leaf: gradient.clone() for leaf, gradient in get_gradients(context_id).items()}
    dist_autograd.backward(context_id, roots, retain_graph)
    after = get_gradients(context_id)
    result: list[Tensor | None] = []
    for leaf in leaves:
        if leaf not in after:
            if not allow_unused:
                raise RuntimeError(
                    f"the outputs do not depend on the input of shape {tuple(leaf.shape)}; was it "
                    "sent as an nn.Parameter? Send module_clone(model, by='clone'), or set "
                    "allow_unused=True."
                )
            result.append(None)
        else:
            result.append(after[leaf] - before[leaf] if leaf in before else after[leaf].clone())
    return tuple(result)


grads = grad
