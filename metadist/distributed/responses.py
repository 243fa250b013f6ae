"""The response to one worker call, sums of responses, and the gradients in a response."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from metadist.distributed.reducers import finish_sum, leaf_dtypes, to_float64, weighted_sum
from metadist.distributed.world import get_rank, host_name
from metadist.errors import UserError, user_traceback
from metadist.gradients import with_gradients


class Gradients(NamedTuple):
    """The gradients of the one differentiable scalar in a result.

    Attributes:
        leaf: the scalar's index among the result's leaves.
        by_input: the gradient of each input, None where the scalar does not depend on it.
    """

    leaf: int
    by_input: list[Tensor | None]


class WorkerResponse(NamedTuple):
    """The response for one shard, or for the weighted sum of a request's shards.

    Attributes:
        value: the function's result, or the sum, whose real tensors are float64.
        gradients: the value's gradients, float64 for a sum; None if there are none.
        dtypes: the final dtypes of a sum's leaves; None for the response for one shard.
        anchor: a zero that must be differentiated too, in an autograd context. It depends on the
            anchors of the request and of the responses to nested calls, so that a backward pass
            reaches their tensors, too, if no result depends on them.
    """

    value: Any
    gradients: Gradients | None
    dtypes: list[torch.dtype | None] | None = None
    anchor: Tensor | None = None


class RemoteFailure(NamedTuple):
    """An exception raised on a worker, as text because it may not unpickle on another one.

    Attributes:
        kind: the name of the exception's class.
        message: the exception's message.
        traceback: the traceback, see `user_traceback`; "" if there is none.
        of_user: whether the exception was a `UserError`.
        where: the worker's rank and machine, such as " (rank 1 on host)".
        worker: the worker's name, if another worker forwards the failure.
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
    """Convert an exception that is being handled on this worker to text."""
    try:
        message = str(error)
    except Exception as str_error:
        message = f"its message cannot be shown: {type(str_error).__name__}"
    return RemoteFailure(
        type(error).__name__,
        message,
        user_traceback(error),
        isinstance(error, UserError),
        f" (rank {get_rank()} on {host_name()})",
    )


def sum_responses(responses: Iterator[WorkerResponse], weights: Sequence[float]) -> WorkerResponse:
    """The weighted sum of responses. They are consumed one at a time, so only one shard's graph and
    gradients are alive beside the sum.

    Args:
        responses: the responses for shards or for sums, with gradients of the same inputs.
        weights: the weight of each response.

    Raises:
        ValueError: the differentiable scalar is not the same leaf of all values.
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
        _require_same_leaf(total.leaf, gradients.leaf)
        for index, gradient in enumerate(gradients.by_input):
            partial_sum = total.by_input[index]
            if gradient is None:
                continue
            if partial_sum is None:
                total.by_input[index] = to_float64(gradient) * weight
            else:
                partial_sum.add_(to_float64(gradient), alpha=weight)
    return WorkerResponse(weighted_sum(values, weights), total, dtypes or leaf_dtypes(values[0]))


def _require_same_leaf(first: int, other: int) -> None:
    if first != other:
        raise ValueError(
            'gradient="worker" differentiates one scalar per result (the loss), and a linear '
            "reducer needs it in the same place of every result; here it is leaf "
            f"{first} of one result and leaf {other} of another: return it in the same place, or "
            'use gradient="dist_autograd".'
        )


def attach_gradients(response: WorkerResponse, inputs: Sequence[Tensor]) -> Any:
    """A response's value, with its scalar as a differentiable function of the caller's `inputs`.

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
    """The sum of the workers' partial sums, divided once. It is differentiable with respect to all
    inputs.

    Args:
        partial: the sum of each worker.
        inputs: the caller's tensors in each worker's request; empty if nothing is differentiated.
            The gradients of a tensor that several workers received are summed.
        divisor: the divisor of the sum; None to return the sum itself.

    Raises:
        ValueError: the differentiable scalar is not the same leaf of all sums.
    """
    assert partial[0].dtypes is not None
    ones = [1] * len(partial)
    total_value = weighted_sum([response.value for response in partial], ones)
    value = finish_sum(total_value, divisor, partial[0].dtypes)
    leaf: int | None = None
    tensors: dict[int, Tensor] = {}
    total: dict[int, Tensor] = {}
    for response, worker_inputs in zip(partial, inputs, strict=True):
        if response.gradients is None:
            continue
        leaf = response.gradients.leaf if leaf is None else leaf
        _require_same_leaf(leaf, response.gradients.leaf)
        for gradient, tensor in zip(response.gradients.by_input, worker_inputs, strict=True):
            if gradient is not None:
                key = id(tensor)
                tensors[key] = tensor
                total[key] = total[key] + gradient if key in total else gradient
    if leaf is None:
        return value
    gradients = Gradients(leaf, [total[key] / (divisor or 1) for key in tensors])
    return attach_gradients(WorkerResponse(value, gradients), list(tensors.values()))
