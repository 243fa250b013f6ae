"""Distributed autograd with the interface of `torch.autograd`: gradients through remote calls.

The calling rank opens a context around forward and backward. A context is not thread-safe.
"""

import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
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

__all__ = ["backward", "context", "get_gradients", "grad", "grads"]


@dataclass
class _Record:
    """The calls that this thread made in a context.

    Attributes:
        anchors: the anchors of the responses; see `WorkerResponse`.
        pending: the anchors of the requests whose gradients torch waits for and whose responses
            have not arrived.
        freed: whether a backward pass has freed the graph of the calls.
    """

    anchors: list[Tensor] = field(default_factory=list)
    pending: set[Tensor] = field(default_factory=set)
    freed: bool = False

    def require_all_ended(self) -> None:
        """Torch would wait forever for the gradients of the arguments of a call without a result.

        Raises:
            UserError: a call failed or has not ended.
        """
        if self.pending:
            raise UserError(
                f"{len(self.pending)} remote calls of this context failed or have not ended, and "
                "distributed autograd would wait for their gradients forever: wait for each call, "
                "and after one that failed open a new context."
            )


class _ThreadState(threading.local):
    """The record of the context that this thread opened, or in which it runs a request."""

    record: _Record | None = None


_thread = _ThreadState()


@contextmanager
def _recording() -> Iterator[_Record]:
    _thread.record = record = _Record()
    try:
        yield record
    finally:
        _thread.record = None


@contextmanager
def context() -> Iterator[int]:
    """Context manager around a forward and backward pass; it yields the context's id.

    Every backward pass goes through all calls of the context: results that the differentiated
    tensors do not depend on get a gradient of zero. Make other calls, such as those of an
    evaluation, outside the context.
    """
    with dist_autograd.context() as context_id, _recording():
        yield context_id


def in_context() -> bool:
    """Whether this thread is in a context."""
    # Usually there is no context, and the exception raised in C++ would be slow.
    if int(dist_autograd._get_debug_info()["num_autograd_contexts"]) == 0:
        return False
    try:
        dist_autograd._current_context()
    except RuntimeError:
        return False
    return True


class _Anchor(torch.autograd.Function):
    """A zero that depends on other anchors, which get no gradient.

    Torch waits for the gradients of every message whose tensors require grad. These share one graph
    node, so that a backward pass that reaches a message's anchor reaches the whole message.
    """

    @staticmethod
    def forward(ctx: Any, zero: Tensor, *anchors: Tensor) -> Tensor:
        ctx.num_inputs = 1 + len(anchors)
        return zero.clone()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[None, ...]:
        return (None,) * ctx.num_inputs


def _new_anchor(*anchors: Tensor) -> Tensor:
    with torch.inference_mode(False):  # enables gradients
        return _Anchor.apply(torch.zeros((), device="cpu", requires_grad=True), *anchors)


class _TensorFinder(pickle.Pickler):
    """Finds the tensors that a message would contain.

    Attributes:
        requires_grad: whether one requires grad.
        has_parameter: whether one that requires grad is an `nn.Parameter`.
    """

    def __init__(self, content: Any) -> None:
        super().__init__(SimpleNamespace(write=len))  # drops the output
        self.requires_grad = self.has_parameter = False
        for leaf in optree.tree_leaves(content, none_is_leaf=True):
            try:
                self.dump(leaf)
            except Exception:  # RPC pickles more types, and reports those it cannot
                self.requires_grad = True

    def persistent_id(self, obj: Any) -> str | None:
        if not isinstance(obj, Tensor):
            return None
        if obj.requires_grad:
            self.requires_grad = True
            self.has_parameter |= isinstance(obj, nn.Parameter)
        return ""


class CallRecord:
    """The record of a call of this thread inside a context, made before the call is sent.

    Args:
        content: the function and the arguments of all shards.

    Attributes:
        anchor: the anchor of the call's requests; see `WorkerRequest`.

    Raises:
        UserError: the content has an `nn.Parameter` that requires grad.
    """

    def __init__(self, content: Any) -> None:
        found = _TensorFinder(content)
        if found.has_parameter:
            raise UserError(
                "an nn.Parameter arrives as another leaf, so that its gradients would stay on the "
                "workers: send module_clone(model, by='clone'), or for a parameter alone its "
                "clone()."
            )
        self._record = _thread.record or _Record()
        self.anchor = torch.zeros((), device="cpu")
        if found.requires_grad:
            self.anchor = _new_anchor()
            self._record.pending.add(self.anchor)

    def complete(self, by_worker: list[list[WorkerResponse]]) -> None:
        """Record the responses to the call."""
        anchors = [response.anchor for responses in by_worker for response in responses]
        self._record.anchors += [anchor for anchor in anchors if anchor is not None]
        self.remove()

    def remove(self) -> None:
        """Wait for the call no longer: it was not sent, or has ended."""
        self._record.pending.discard(self.anchor)


def run_in_context(
    anchor: Tensor, respond: Callable[[], list[WorkerResponse]]
) -> list[WorkerResponse]:
    """Run a request in the caller's context, on the worker.

    Args:
        anchor: the request's anchor.
        respond: the function that computes the responses.

    Returns:
        The responses, the first one with an anchor if torch waits for a gradient of the request, of
        a response to a nested call or of these responses.

    Raises:
        UserError: a nested call failed or has not ended.
    """
    with _recording() as record:
        first, *others = respond()
        record.require_all_ended()
    anchors = [anchor, *record.anchors] if anchor.requires_grad else record.anchors
    if anchors or _TensorFinder([first.value, *(other.value for other in others)]).requires_grad:
        first = first._replace(anchor=_new_anchor(*anchors))
    return [first, *others]


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
        RuntimeError: the outputs do not depend on an input and `allow_unused` is False, an input
            does not require grad or is not a leaf, or an earlier pass has freed the graph.
        UserError: a call of the context failed or has not ended.
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
    record = _thread.record or _Record()
    record.require_all_ended()
    if record.freed:
        # Workers would wait for gradients that do not arrive after an error, until the shutdown.
        raise RuntimeError(
            "an earlier backward pass of this context has freed its graph, through which every "
            "pass goes: give retain_graph=True to all passes but the last."
        )
    # The context accumulates gradients over backward passes. Its sums are set to zero for this pass
    # and added back afterwards: in a difference of sums, small gradients would be rounded away.
    with torch.no_grad():
        sums = get_gradients(context_id)
        previous_sums = {leaf: value.clone() for leaf, value in sums.items()}
        for value in sums.values():
            value.zero_()
        versions = {leaf: value._version for leaf, value in sums.items()}
        try:
            dist_autograd.backward(context_id, [*roots, *record.anchors], retain_graph)
        except RuntimeError:
            for leaf, value in previous_sums.items():
                sums[leaf].copy_(value)
            require_alive(current_transport().names)
            raise
        record.freed = bool(record.anchors) and not retain_graph
        gradients = {}
        for leaf, value in get_gradients(context_id).items():
            # A zero that this pass wrote is a gradient; a zero that it did not change is not.
            if value is not sums.get(leaf) or value._version != versions[leaf]:
                gradients[leaf] = value.clone()
            if leaf in previous_sums:
                value.add_(previous_sums[leaf])
    return gradients


grads = grad
