"""The request of one worker call: what a worker runs.

A worker gets all its shards of a call in one request. What they share (a model, say) is pickled
once, and a request occupies one thread however many shards it has. With a linear reducer the
worker sums its results before it responds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import optree
import torch
from torch import Tensor

from metadist.distributed.responses import (
    Gradients,
    RemoteFailure,
    WorkerResponse,
    remote_failure,
    sum_responses,
)
from metadist.gradients import tensors_of

Call = tuple[tuple, dict]
"""(args, kwargs) of one shard."""


class BatchedMapper(Protocol):
    """A function that maps several shards at once, where that is faster than one by one."""

    def map_batched(self, calls: list[Call]) -> list[Any]:
        """What the function returns for each of the calls."""


class SummingMapper(Protocol):
    """A function that sums its own shards, where that is faster than one by one."""

    def weighted_sum(
        self, calls: list[Call], weights: list[float], inputs: Sequence[Tensor]
    ) -> WorkerResponse:
        """The sum of `weight * function(*args, **kwargs)` and its gradients, in float64, detached.

        Args:
            calls: the shards.
            weights: how often each counts.
            inputs: what to differentiate with respect to.
        """


@dataclass(frozen=True)
class WorkerRequest:
    """One worker's shards of a call.

    Attributes:
        function: the mapper. It may be a `BatchedMapper` or a `SummingMapper`.
        calls: (args, kwargs) of each shard, run in order.
        weights: how often each shard counts, to respond with one weighted sum; None to respond
            with every result.
        grad_indices: indices, among `tensors_of(calls)`, of the inputs to differentiate with
            respect to. None leaves gradients to the distributed autograd context, if any.
        in_context: results keep their graph, which a context records across the workers.
        keep_device: leave results on their device instead of moving them to the CPU.
        single_worker: the caller named this worker; the call has no other request.
    """

    function: Callable[..., Any]
    calls: list[Call]
    weights: list[float] | None = None
    grad_indices: list[int] | None = None
    in_context: bool = False
    keep_device: bool = False
    single_worker: bool = False

    def run(self) -> list[WorkerResponse]:
        """A response for each shard, or a single one for their weighted sum."""
        if not self.in_context:
            return self._responses()
        from metadist.distributed import autograd  # it needs torch.distributed.autograd

        with autograd.recording_nested_calls(tensors_of(self.calls)) as attach_unused:
            return attach_unused(self._responses())

    def respond(self) -> list[WorkerResponse] | RemoteFailure:
        """The same as `run`; an exception becomes a `RemoteFailure`, SystemExit too."""
        try:
            return self.run()
        except BaseException as error:
            return remote_failure(error)

    def _responses(self) -> list[WorkerResponse]:
        inputs = None
        if self.grad_indices is not None:
            tensors = tensors_of(self.calls)
            inputs = [tensors[index].requires_grad_() for index in self.grad_indices]
        return run_shards(self.function, self.calls, self.weights, inputs, self._convert_leaf)

    def _convert_leaf(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        leaf = leaf if self.in_context else leaf.detach()
        return leaf if self.keep_device or leaf.is_cpu else leaf.cpu()


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def run_shards(
    function: Callable[..., Any],
    calls: Sequence[Call],
    weights: Sequence[float] | None = None,
    inputs: Sequence[Tensor] | None = None,
    convert_leaf: Callable[[Any], Any] | None = None,
) -> list[WorkerResponse]:
    """Run a function on several shards in this process, in order.

    Args:
        function: the mapper. It may be a `BatchedMapper` or a `SummingMapper`.
        calls: (args, kwargs) of each shard.
        weights: how often each shard counts, for one weighted sum; None for every result.
        inputs: what to differentiate the scalar in the results with respect to; None for no
            gradients.
        convert_leaf: what to return of a leaf of a result. Default: the leaf, detached; a
            `SummingMapper` detaches its sums itself.

    Returns:
        A response for each shard, or a single one for their weighted sum.
    """
    convert = convert_leaf or _detached

    def converted(result: Any) -> Any:
        if isinstance(result, Tensor):
            return convert(result)
        return optree.tree_map(convert, result, none_is_leaf=True)

    # isinstance with a protocol would take longer than a small function.
    if inputs is not None and weights and hasattr(function, "weighted_sum"):
        response = function.weighted_sum(calls, weights, inputs)
        if convert_leaf is None:
            return [response]
        value, gradients = converted((response.value, response.gradients))
        return [response._replace(value=value, gradients=gradients)]
    if inputs is None and weights is None and hasattr(function, "map_batched"):
        return [WorkerResponse(converted(each), None) for each in function.map_batched(calls)]
    responses = (_run_shard(function, args, kwargs, inputs, converted) for args, kwargs in calls)
    return list(responses) if weights is None else [sum_responses(responses, weights)]


def _run_shard(
    function: Callable[..., Any],
    args: tuple,
    kwargs: dict,
    inputs: Sequence[Tensor] | None,
    converted: Callable[[Any], Any],
) -> WorkerResponse:
    if inputs is None:
        return WorkerResponse(converted(function(*args, **kwargs)), None)
    with torch.enable_grad():
        result = function(*args, **kwargs)
    leaves = optree.tree_leaves(result, none_is_leaf=True)
    differentiable = [
        index
        for index, leaf in enumerate(leaves)
        if isinstance(leaf, Tensor) and leaf.requires_grad
    ]
    if not differentiable or not inputs:
        return WorkerResponse(converted(result), None)
    index = differentiable[0]
    if len(differentiable) > 1 or leaves[index].numel() != 1:
        raise ValueError(
            'gradient="worker" differentiates one scalar per result (the loss); this result '
            f"has {len(differentiable)} differentiable tensors, the first of shape "
            f"{tuple(leaves[index].shape)}: detach the others, or use "
            'gradient="dist_autograd".'
        )
    found = torch.autograd.grad(leaves[index], inputs, allow_unused=True)
    gradients = Gradients(index, converted(list(found)))
    return WorkerResponse(converted(result), gradients)
