"""Distributed autograd with the interface of `torch.autograd`: gradients through remote calls.

The calling rank opens a context around forward and backward. A context is not thread-safe.
"""

import contextlib
import pickle
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import optree
import torch
from torch import Tensor, nn
from torch.distributed import autograd as dist_autograd

from metadist.distributed.responses import WorkerResponse
from metadist.distributed.transport import current_transport, require_alive
from metadist.errors import UserError
from metadist.gradients import tensors_of

__all__ = ["backward", "context", "get_gradients", "grad", "grads"]


@dataclass(eq=False)
class CallRecord:
    """A call inside a context.

    Attributes:
        calls: the calls of the context, including this one.
        sent: the graph nodes of the arguments.
        waits: whether torch waits for the gradients of the arguments.
        received: the results that require grad.
        anchors: the anchors of the responses; see `WorkerResponse`.
        ended: whether the responses have arrived.
    """

    calls: list["CallRecord"]
    sent: list[Any]
    waits: bool
    received: list[Tensor] = field(default_factory=list)
    anchors: list[Tensor] = field(default_factory=list)
    ended: bool = False

    def complete(self, by_worker: list[list[WorkerResponse]]) -> None:
        """Record the responses to the call."""
        responses = [response for responses in by_worker for response in responses]
        self.anchors = [response.anchor for response in responses if response.anchor is not None]
        values: Any = [response.value for response in responses]
        self.received = [leaf for leaf in tensors_of(values) if _has_graph(leaf)]
        self.ended = True

    def remove(self) -> None:
        """Remove the record of a call that was not sent."""
        self.calls.remove(self)


class _CallRecords(threading.local):
    """This thread's calls in each context that it opened or in which it runs a request."""

    def __init__(self) -> None:
        self.by_context: dict[int, list[CallRecord]] = {}


_records = _CallRecords()


def _calls(context_id: int) -> list[CallRecord]:
    return _records.by_context.get(context_id, [])


@contextmanager
def context() -> Iterator[int]:
    """Context manager around a forward and backward pass; it yields the context's id.

    The differentiated tensors must depend on every remote result that requires grad: make other
    calls, such as those of an evaluation, outside the context. (In a function that runs on a worker
    inside the context, unused results of its own calls get a gradient of zero.)
    """
    with dist_autograd.context() as context_id, _recording(context_id):
        yield context_id


def current_context() -> int | None:
    """The id of the context that this thread is in."""
    # Usually there is no context, and the exception raised in C++ would be slow.
    if int(dist_autograd._get_debug_info()["num_autograd_contexts"]) == 0:
        return None
    try:
        return int(dist_autograd._current_context()._context_id())
    except RuntimeError:
        return None


@contextmanager
def recording_nested_calls(
    received: Sequence[Tensor],
) -> Iterator[Callable[[list[WorkerResponse]], list[WorkerResponse]]]:
    """Context manager for running a request in the caller's context, on the worker.

    Torch waits for the gradients of all tensors that were sent. The responses must therefore be
    passed to the yielded function, which makes them depend on the tensors that they do not use.

    Args:
        received: the tensors among the request's arguments.
    """
    context_id = dist_autograd._current_context()._context_id()
    with _recording(context_id):
        yield lambda responses: _with_unused(context_id, responses, received)


@contextmanager
def _recording(context_id: int) -> Iterator[None]:
    outer_records = _records.by_context.get(context_id)
    _records.by_context[context_id] = []
    try:
        yield
    finally:
        if outer_records is None:
            del _records.by_context[context_id]
        else:
            _records.by_context[context_id] = outer_records


def record_call(context_id: int, arguments: Any) -> CallRecord:
    """Record a call of this thread inside a context, before it is sent.

    Args:
        context_id: the context's id.
        arguments: the arguments of all shards.

    Returns:
        The record; pass the responses to its `complete`.

    Raises:
        UserError: the arguments contain an `nn.Parameter` that requires grad, or a tensor that
            requires grad in an object that is not a container.
    """
    sent = tensors_of(arguments)
    if any(isinstance(tensor, nn.Parameter) and tensor.requires_grad for tensor in sent):
        raise UserError(
            "an nn.Parameter arrives as another leaf, so that its gradients would stay on the "
            "workers: send module_clone(model, by='clone'), or for a parameter alone its clone()."
        )
    _require_in_containers(arguments, sent, "passed")
    nodes = [tensor.grad_fn for tensor in sent if tensor.grad_fn is not None]
    calls = _calls(context_id)
    record = CallRecord(calls, nodes, any(tensor.requires_grad for tensor in sent))
    calls.append(record)
    return record


class _TensorFinder(pickle.Pickler):
    """Finds the tensors that a pickle would contain."""

    def __init__(self) -> None:
        super().__init__(SimpleNamespace(write=len))  # drops the output
        self.found: list[Tensor] = []

    def persistent_id(self, obj: Any) -> str | None:
        if not isinstance(obj, Tensor):
            return None
        self.found.append(obj)
        return ""


def _require_in_containers(tree: Any, tensors: Sequence[Tensor], verb: str) -> None:
    """Torch would wait forever for the gradients of a tensor that is not among `tensors`."""
    finder = _TensorFinder()
    with contextlib.suppress(Exception):  # RPC pickles more types, and reports those it cannot
        finder.dump(tree)
    ids = {id(tensor) for tensor in tensors}
    if any(tensor.requires_grad and id(tensor) not in ids for tensor in finder.found):
        raise UserError(
            f"inside a context a tensor that requires grad was {verb} in an object that is neither "
            "a tuple, list, dict nor dataclass, or in a module without being its parameter, and "
            "distributed autograd may wait for its gradient forever: put it into one of those, or "
            "detach it."
        )


def _has_graph(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.grad_fn is not None


def _reached(context_id: int, roots: Iterable[Tensor]) -> set[Any]:
    """The graph nodes on which the roots depend, directly or through calls of this thread."""
    arguments = {
        leaf.grad_fn: record.sent for record in _calls(context_id) for leaf in record.received
    }
    reached = set()
    pending: list[Any] = [root.grad_fn for root in roots]
    while pending:
        node = pending.pop()
        if node is not None and node not in reached:
            reached.add(node)
            pending += [next_node for next_node, _ in node.next_functions]
            pending += arguments.get(node, [])
    return reached


def _received(context_id: int) -> list[Tensor]:
    return [leaf for record in _calls(context_id) for leaf in record.received]


def _anchors(context_id: int) -> list[Tensor]:
    return [anchor for record in _calls(context_id) for anchor in record.anchors]


def _require_all_ended(context_id: int) -> None:
    """Torch would wait forever for the gradients of the arguments of a call without a result."""
    missing = sum(record.waits and not record.ended for record in _calls(context_id))
    if missing:
        raise UserError(
            f"{missing} remote calls of this context failed or have not ended, and distributed "
            "autograd would wait for their gradients forever: wait for each call, and after one "
            "that failed open a new context."
        )


def _require_all_received(context_id: int, roots: list[Tensor]) -> None:
    """Torch would wait forever for the gradients of unused remote results."""
    _require_all_ended(context_id)
    reached = _reached(context_id, roots)
    missing = sum(leaf.grad_fn not in reached for leaf in _received(context_id))
    if missing:
        raise UserError(
            f"{missing} remote results that require grad are not part of what is differentiated, "
            "and distributed autograd would wait for their gradients forever: use one context for "
            "each backward pass and make other remote calls outside of it."
        )


class _WithUnused(torch.autograd.Function):
    """The identity of `value`, with gradients of zero for `unused`."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, *unused: Tensor) -> Tensor:
        ctx.save_for_backward(*unused)
        return value.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, ...]:
        return grad_output, *map(torch.zeros_like, ctx.saved_tensors)


def _with_unused(
    context_id: int, responses: list[WorkerResponse], arguments: Sequence[Tensor]
) -> list[WorkerResponse]:
    """Responses that depend on all arguments and on all results of nested calls."""
    _require_all_ended(context_id)
    values: Any = [response.value for response in responses]
    tensors = tensors_of(values)
    _require_in_containers(values, tensors, "returned")
    leaves, structure = optree.tree_flatten(values, none_is_leaf=True)
    with_graph = [index for index, leaf in enumerate(leaves) if _has_graph(leaf)]
    reached = _reached(context_id, filter(_has_graph, tensors))
    candidates = [*_received(context_id), *_anchors(context_id), *filter(_has_graph, arguments)]
    # One tensor per node: the tensors of a message share one.
    unused = {leaf.grad_fn: leaf for leaf in candidates if leaf.grad_fn not in reached}.values()
    if not unused:
        return responses
    if not with_graph:
        anchor = _WithUnused.apply(torch.zeros(()), *unused)
        return [responses[0]._replace(anchor=anchor), *responses[1:]]
    leaves[with_graph[0]] = _WithUnused.apply(leaves[with_graph[0]], *unused)
    attached: Any = optree.tree_unflatten(structure, leaves)
    return [
        response._replace(value=value) for response, value in zip(responses, attached, strict=True)
    ]


def get_gradients(context_id: int) -> dict[Tensor, Tensor]:
    """The gradients of this worker's leaf tensors, accumulated in the context.

    Args:
        context_id: the id that `context()` yielded.
    """
    return dist_autograd.get_gradients(context_id)


def backward(
    context_id: int,
    tensors: Tensor | Sequence[Tensor],
    retain_graph: bool = False,
    inputs: Tensor | Sequence[Tensor] | None = None,
) -> None:
    """Run the backward pass through all workers; adds to `.grad` of this worker's leaf tensors.

    The gradients of other workers' leaves stay in the context. It raises the same errors as `grad`,
    except for unused inputs.

    Args:
        context_id: the id that `context()` yielded.
        tensors: the scalars to differentiate.
        retain_graph: whether to keep the graph for another backward pass in this context.
        inputs: the leaf tensors to accumulate gradients in. Default: all leaves that `tensors`
            depend on.
    """
    roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    input_leaves = None if inputs is None else _leaves(inputs)
    with torch.no_grad():
        for leaf, gradient in _backward(context_id, roots, retain_graph).items():
            if input_leaves is None or any(leaf is tensor for tensor in input_leaves):
                leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient


def grad(
    context_id: int,
    outputs: Tensor | Sequence[Tensor],
    inputs: Tensor | Sequence[Tensor],
    retain_graph: bool = False,
    allow_unused: bool = False,
) -> tuple[Tensor | None, ...]:
    """The gradients of scalars with respect to this worker's leaf tensors; `.grad` is unchanged.

    Args:
        context_id: the id that `context()` yielded.
        outputs: the scalars to differentiate.
        inputs: leaf tensors of this worker, or an iterable of them (`model.parameters()`).
        retain_graph: whether to keep the graph for another backward pass in this context.
        allow_unused: whether to return None for inputs that the outputs do not depend on, instead
            of raising an error.

    Returns:
        A gradient for each input.

    Raises:
        RuntimeError: the outputs do not depend on an input and `allow_unused` is False, or an input
            does not require grad or is not a leaf.
        UserError: the outputs do not depend on a remote result of the context, or a call of the
            context failed or has not ended.
        WorkerLostError: a worker died.
    """
    roots = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    leaves = _leaves(inputs)
    gradients = _backward(context_id, roots, retain_graph)
    for leaf in leaves:
        if leaf not in gradients and not allow_unused:
            raise RuntimeError(
                f"the outputs do not depend on the input of shape {tuple(leaf.shape)}; was it "
                "sent as an nn.Parameter? Send module_clone(model, by='clone'), or set "
                "allow_unused=True."
            )
    return tuple(map(gradients.get, leaves))


def _leaves(inputs: Tensor | Sequence[Tensor]) -> list[Tensor]:
    leaves = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    for leaf in leaves:
        if leaf.grad_fn is not None:
            raise RuntimeError(
                f"the input of shape {tuple(leaf.shape)} was computed from others: pass leaf "
                "tensors, such as its detach().requires_grad_()."
            )
        if not leaf.requires_grad:
            raise RuntimeError(
                f"the input of shape {tuple(leaf.shape)} requires no gradient: pass inputs "
                "that the outputs were computed from, with requires_grad=True."
            )
    return leaves


def _backward(context_id: int, roots: list[Tensor], retain_graph: bool) -> dict[Tensor, Tensor]:
    """Run one backward pass and return the gradients of this worker's leaves that it reached."""
    _require_all_received(context_id, roots)
    # The context accumulates gradients over backward passes. Its sums are set to zero for this pass
    # and added back afterwards: in a difference of sums, small gradients would be rounded away.
    with torch.no_grad():
        sums = get_gradients(context_id)
        previous_sums = {leaf: value.clone() for leaf, value in sums.items()}
        for value in sums.values():
            value.zero_()
        versions = {leaf: value._version for leaf, value in sums.items()}
        try:
            dist_autograd.backward(context_id, [*roots, *_anchors(context_id)], retain_graph)
        except RuntimeError:
            for leaf, value in previous_sums.items():
                sums[leaf].copy_(value)
            require_alive(current_transport().names)
            raise
        gradients = {}
        for leaf, value in get_gradients(context_id).items():
            # A zero that this pass wrote is a gradient; a zero that it did not change is not.
            if value is not sums.get(leaf) or value._version != versions[leaf]:
                gradients[leaf] = value.clone()
            if leaf in previous_sums:
                value.add_(previous_sums[leaf])
    return gradients


grads = grad
