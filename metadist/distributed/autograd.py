"""Distributed autograd: derivatives through remote calls, in the words of `torch.autograd`.

The calling rank opens a context around forward and backward. A context is not thread-safe.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import optree
import torch
from torch import Tensor
from torch.distributed import autograd as dist_autograd

from metadist.errors import UserError

__all__ = ["backward", "context", "get_gradients", "grad", "grads"]

T = TypeVar("T")


class _Journey(NamedTuple):
    """A call inside a context, as the caller's graph knows it.

    Attributes:
        sent: the graph nodes of the arguments.
        received: the results with a derivative.
    """

    sent: list[Any]
    received: list[Tensor]


class _Opened(threading.local):
    """The contexts that this thread has opened, or serves a visit in, each with the calls that it
    has made in them.
    """

    def __init__(self) -> None:
        self.journeys: dict[int, list[_Journey]] = {}


_opened = _Opened()


@contextmanager
def context() -> Iterator[int]:
    """Context manager around a forward and its backward pass; it yields the context's number.

    Every remote result with a derivative that is called for inside must take part in what is
    differentiated: make other calls, an evaluation's for instance, outside of the context. (In a
    function that runs on a worker inside the context, results that it calls for and does not use
    count as used, with a derivative of zero.)
    """
    with dist_autograd.context() as context_id, _noting(context_id):
        yield context_id


@contextmanager
def serving() -> Iterator[Callable[[T], T]]:
    """Around a visit that a caller's context includes, on the worker.

    It yields a function that the visit's result must pass through: it makes what the visit called
    for and did not use a part of the result, for torch waits for the derivatives of all of it.
    """
    context_id = dist_autograd._current_context()._context_id()
    with _noting(context_id):
        yield lambda result: _with_unused(context_id, result)


@contextmanager
def _noting(context_id: int) -> Iterator[None]:
    outer = _opened.journeys.get(context_id)
    _opened.journeys[context_id] = []
    try:
        yield
    finally:
        if outer is None:
            del _opened.journeys[context_id]
        else:
            _opened.journeys[context_id] = outer


def note_call(context_id: int, sent: Sequence[Tensor]) -> Callable[[Any], None]:
    """For a call inside a context, made by this thread: a function to be told its results.

    Args:
        context_id: the context's number.
        sent: the call's arguments.
    """
    journeys = _opened.journeys.get(context_id, [])
    nodes = [tensor.grad_fn for tensor in sent if tensor.grad_fn is not None]

    def note(results: Any) -> None:
        received = [leaf for leaf in optree.tree_leaves(results) if _has_graph(leaf)]
        journeys.append(_Journey(nodes, received))

    return note


def _has_graph(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.grad_fn is not None


def _unused(context_id: int, roots: Iterable[Tensor]) -> list[Tensor]:
    """The results of this thread's calls that do not lead to the roots, directly or as arguments
    of further calls.
    """
    journeys = _opened.journeys.get(context_id, [])
    results = [(leaf, leaf.grad_fn) for journey in journeys for leaf in journey.received]
    before = {leaf.grad_fn: journey.sent for journey in journeys for leaf in journey.received}
    reached = set()
    waiting = [root.grad_fn for root in roots]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in reached:
            reached.add(node)
            waiting += [following for following, _ in node.next_functions]
            waiting += before.get(node, [])
    return [leaf for leaf, node in results if node not in reached]


def _require_all_received(context_id: int, roots: list[Tensor]) -> None:
    """Torch waits for ever for the gradients of remote results that play no part."""
    missing = len(_unused(context_id, roots))
    if missing:
        raise UserError(
            f"{missing} remote results with a derivative take no part in what is differentiated, "
            "and distributed autograd would wait for them for ever: use one context for each "
            "backward pass and make other remote calls outside of it."
        )


class _WithUnused(torch.autograd.Function):
    """A tensor that passes derivatives of zero on to others."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, *unused: Tensor) -> Tensor:
        ctx.save_for_backward(*unused)
        return value.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, ...]:
        return outer, *map(torch.zeros_like, ctx.saved_tensors)


def _with_unused(context_id: int, result: T) -> T:
    leaves, structure = optree.tree_flatten(result, none_is_leaf=True)
    places = [place for place, leaf in enumerate(leaves) if _has_graph(leaf)]
    unused = _unused(context_id, [leaves[place] for place in places])
    if not unused:
        return result
    if not places:
        raise UserError(
            f"a function called {len(unused)} remote results with a derivative inside a context "
            "and returns no tensor that has one, so that distributed autograd would wait for them "
            "for ever: make the calls under torch.no_grad() or return what depends on them."
        )
    leaves[places[0]] = _WithUnused.apply(leaves[places[0]], *unused)
    return optree.tree_unflatten(structure, leaves)


def get_gradients(context_id: int) -> dict[Tensor, Tensor]:
    """The gradients that backward passes left in the context, for this worker's leaf tensors.

    Args:
        context_id: the number that `context()` yielded.
    """
    return dist_autograd.get_gradients(context_id)


def backward(
    context_id: int,
    tensors: Tensor | Sequence[Tensor],
    retain_graph: bool = False,
    inputs: Tensor | Sequence[Tensor] | None = None,
) -> None:
    """The backward pass through all workers; adds to `.grad` of this worker's leaf tensors.

    Other workers' leaves keep their gradients in the context. Raises what `grad` raises, but for
    unused inputs.

    Args:
        context_id: the number that `context()` yielded.
        tensors: the scalars to differentiate.
        retain_graph: keep the graph for another backward pass in this context.
        inputs: the leaf tensors whose `.grad` is added to. Default: all that play a part.
    """
    roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    chosen = None if inputs is None else _leaves(inputs)
    with torch.no_grad():
        for leaf, gradient in _backward(context_id, roots, retain_graph).items():
            if chosen is None or any(leaf is each for each in chosen):
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
        RuntimeError: an input that the outputs do not depend on, without `allow_unused`; one that
            requires no gradient.
        UserError: a remote result of the context that plays no part in the outputs.
    """
    roots = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    leaves = _leaves(inputs)
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


def _leaves(inputs: Tensor | Sequence[Tensor]) -> list[Tensor]:
    leaves = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    for leaf in leaves:
        if not leaf.requires_grad:
            raise RuntimeError(
                f"the input of shape {tuple(leaf.shape)} requires no gradient: take inputs that "
                "the outputs were computed from, with requires_grad=True."
            )
    return leaves


def _backward(context_id: int, roots: list[Tensor], retain_graph: bool) -> dict[Tensor, Tensor]:
    """One backward pass; what it alone gave those of this worker's leaves that it reached."""
    _require_all_received(context_id, roots)
    # The context adds up over its backward passes. Its sums are set to zero for this pass and
    # given back afterwards: a difference of sums would lose small gradients beside large ones.
    with torch.no_grad():
        sums = get_gradients(context_id)
        before = {leaf: value.clone() for leaf, value in sums.items()}
        for value in sums.values():
            value.zero_()
        versions = {leaf: value._version for leaf, value in sums.items()}
        dist_autograd.backward(context_id, roots, retain_graph)
        gradients = {}
        for leaf, value in get_gradients(context_id).items():
            # A zero that the pass wrote is a derivative; one that it left alone is none.
            if value is not sums.get(leaf) or value._version != versions[leaf]:
                gradients[leaf] = value.clone()
            if leaf in before:
                value.add_(before[leaf])
    return gradients


grads = grad
