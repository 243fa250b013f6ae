"""Distributed autograd: derivatives through remote calls, in the words of `torch.autograd`.

The calling rank opens a context around forward and backward. A context is not thread-safe.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import optree
import torch
from torch import Tensor
from torch.distributed import autograd as dist_autograd

from metadist.errors import UserError

__all__ = ["backward", "context", "get_gradients", "grad", "grads"]


class _Opened(threading.local):
    """The contexts that this thread has opened (a thread that serves a visit is in one that
    another has opened), each with the graph nodes at which remote results came home.
    """

    def __init__(self) -> None:
        self.received: dict[int, list[Any]] = {}


_opened = _Opened()


@contextmanager
def context() -> Iterator[int]:
    """Context manager around a forward and its backward pass; it yields the context's number.

    Every remote result with a derivative that is called for inside must take part in what is
    differentiated: make other calls, an evaluation's for instance, outside of the context.
    """
    with dist_autograd.context() as context_id:
        _opened.received[context_id] = []
        try:
            yield context_id
        finally:
            del _opened.received[context_id]


def note_results(context_id: int) -> Callable[[Any], None]:
    """For a call inside a context, made by this thread: a function to be told its results."""
    nodes = _opened.received.get(context_id, [])

    def note(results: Any) -> None:
        nodes.extend(
            leaf.grad_fn
            for leaf in optree.tree_leaves(results)
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None
        )

    return note


def _require_all_received(context_id: int, roots: list[Tensor]) -> None:
    """Torch waits for ever for the gradients of remote results that play no part."""
    reached = set()
    waiting = [root.grad_fn for root in roots]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in reached:
            reached.add(node)
            waiting += [following for following, _ in node.next_functions]
    missing = sum(node not in reached for node in _opened.received.get(context_id, []))
    if missing:
        raise UserError(
            f"{missing} remote results with a derivative take no part in what is differentiated, "
            "and distributed autograd would wait for them for ever: use one context for each "
            "backward pass and make other remote calls outside of it."
        )


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

    Other workers' leaves keep their gradients in the context. Raises what `grad` raises, but for
    unused inputs.

    Args:
        context_id: the number that `context()` yielded.
        tensors: the scalars to differentiate.
        retain_graph: keep the graph for another backward pass in this context.
    """
    roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    with torch.no_grad():
        for leaf, gradient in _backward(context_id, roots, retain_graph).items():
            leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient


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
        UserError: a remote result of the context that plays no part in the outputs.
    """
    roots = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    leaves = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    gradients = _backward(context_id, roots, retain_graph)
    result: list[Tensor | None] = []
    for leaf in leaves:
        if leaf not in gradients:
            if not allow_unused:
                raise RuntimeError(
                    f"the outputs do not depend on the input of shape {tuple(leaf.shape)}; was it "
                    "sent as an nn.Parameter? Send module_clone(model, by='clone'), or set "
                    "allow_unused=True."
                )
            result.append(None)
        else:
            result.append(gradients[leaf])
    return tuple(result)


def _backward(context_id: int, roots: list[Tensor], retain_graph: bool) -> dict[Tensor, Tensor]:
    """One backward pass; what it alone gave this worker's leaves."""
    _require_all_received(context_id, roots)
    # The context adds up over its backward passes. Its sums are set to zero for this pass and
    # given back afterwards: a difference of sums would lose small gradients beside large ones.
    with torch.no_grad():
        before = {leaf: sums.clone() for leaf, sums in get_gradients(context_id).items()}
        for sums in get_gradients(context_id).values():
            sums.zero_()
        dist_autograd.backward(context_id, roots, retain_graph)
        gradients = {leaf: sums.clone() for leaf, sums in get_gradients(context_id).items()}
        for leaf, sums in get_gradients(context_id).items():
            if leaf in before:
                sums.add_(before[leaf])
    return gradients


grads = grad
