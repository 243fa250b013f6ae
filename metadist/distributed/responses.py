"""The response to one worker call, sums of responses, and gradients that come with a response."""

import traceback
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from metadist.distributed.reducers import finish_sum, leaf_dtypes, to_float64, weighted_sum
from metadist.distributed.world import get_rank, host_name
from metadist.errors import UserError
from metadist.gradients import with_gradients


class Gradients(NamedTuple):
    """The gradients of the one differentiable scalar in a result.

    Attributes:
        leaf: the scalar's index among the result's leaves.
        by_input: a tensor for each input, None where the scalar does not depend on it.
    """

    leaf: int
    by_input: list[Tensor | None]


class WorkerResponse(NamedTuple):
    """The response for one shard, or for the weighted sum of a request's shards.

    Attributes:
        value: the function's result; a sum has its real tensors in float64.
        gradients: its gradients, in float64 for a sum; None if not requested or none exist.
        dtypes: for a sum, the final types of its leaves.
        anchor: in a context, a zero to differentiate too: it leads to the tensors on which no
            result depends, so that their senders get gradients.
    """

    value: Any
    gradients: Gradients | None
    dtypes: list[torch.dtype | None] | None = None
    anchor: Tensor | None = None


class RemoteFailure(NamedTuple):
    """What a function raised on its worker, as text: exceptions may not unpickle elsewhere.

    Attributes:
        kind: the exception's class.
        message: its text.
        traceback: as Python prints it; "" where there is none.
        of_user: whether it was a `UserError`.
        where: the worker's rank and machine, " (rank 1 on host)".
        worker: its name, where another worker passes the failure on.
        lost_rank: the rank of a worker that was lost.
        timed_out: whether a worker did not respond in time.
    """

    kind: str
    message: str
    traceback: str
    of_user: bool
    where: str = ""
    worker: str = ""
    lost_rank: int | None = None
    timed_out: bool = False


def remote_failure(error: BaseException) -> RemoteFailure:
    """An exception that is being handled on this worker, as text."""
    try:
        message = str(error)
    except Exception as failed:
        message = f"its message cannot be shown: {type(failed).__name__}"
    return RemoteFailure(
        type(error).__name__,
        message,
        traceback.format_exc(),
        isinstance(error, UserError),
        f" (rank {get_rank()} on {host_name()})",
    )


def sum_responses(responses: Iterator[WorkerResponse], weights: Sequence[float]) -> WorkerResponse:
    """The weighted sum of responses, which are consumed one at a time: one shard's graph and
    gradients are alive beside the sum.

    Args:
        responses: of shards, or sums themselves, with gradients with respect to the same inputs.
        weights: how often each counts.
    """
    values: list[Any] = []
    total: Gradients | None = None
    dtypes: list[torch.dtype | None] | None = None
    for response, weight in zip(responses, weights, strict=True):
        values.append(response.value)
        dtypes, gradients = response.dtypes, response.gradients
        if gradients is None:
            continue
        if total is None:
            total = Gradients(gradients.leaf, [None] * len(gradients.by_input))
        for index, gradient in enumerate(gradients.by_input):
            so_far = total.by_input[index]
            if gradient is None:
                continue
            if so_far is None:
                total.by_input[index] = to_float64(gradient) * weight
            else:
                so_far.add_(to_float64(gradient), alpha=weight)
    return WorkerResponse(weighted_sum(values, weights), total, dtypes or leaf_dtypes(values[0]))


def attach_gradients(response: WorkerResponse, inputs: Sequence[Tensor]) -> Any:
    """A response's value, its scalar a differentiable function of the caller's `inputs`.

    Args:
        response: the response for one shard.
        inputs: the caller's tensors, in the order of the response's gradients.
    """
    if response.gradients is None:
        return response.value
    leaf, by_input = response.gradients
    leaves, structure = optree.tree_flatten(response.value, none_is_leaf=True)
    gradients = [
        None if gradient is None else gradient.to(tensor)
        for gradient, tensor in zip(by_input, inputs, strict=True)
    ]
    leaves[leaf] = with_gradients(leaves[leaf], inputs, gradients)
    return optree.tree_unflatten(structure, leaves)


def attach_summed_gradients(
    partial: Sequence[WorkerResponse],
    inputs: Sequence[Sequence[Tensor]],
    divisor: float | None,
) -> Any:
    """The sum of the workers' partial sums, divided once, differentiable with respect to all their
    inputs.

    Args:
        partial: each worker's sum.
        inputs: the caller's tensors in each worker's request; empty where nothing is
            differentiated. The gradients of a tensor that several workers received are summed.
        divisor: what the sum is divided by; None for a sum.
    """
    assert partial[0].dtypes is not None
    ones = [1] * len(partial)
    total_value = weighted_sum([response.value for response in partial], ones)
    value = finish_sum(total_value, divisor, partial[0].dtypes)
    leaf: int | None = None
    tensors: dict[int, Tensor] = {}
    total: dict[int, Tensor] = {}
    for response, given in zip(partial, inputs, strict=True):
        if response.gradients is None:
            continue
        leaf = response.gradients.leaf
        for gradient, tensor in zip(response.gradients.by_input, given, strict=True):
            if gradient is not None:
                tensors[id(tensor)] = tensor
                so_far = total.get(id(tensor))
                total[id(tensor)] = gradient if so_far is None else so_far + gradient
    if leaf is None:
        return value
    gradients = Gradients(leaf, [total[key] / (divisor or 1) for key in tensors])
    return attach_gradients(WorkerResponse(value, gradients), list(tensors.values()))
