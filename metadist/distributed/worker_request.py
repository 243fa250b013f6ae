"""The request of one worker call, and how a worker runs it.

A worker gets all its shards of a call in one request. Objects that the shards share, such as a
model, are pickled once, and a request occupies one thread for any number of shards. With a linear
reducer the worker sums its results before it responds.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import optree
import torch
from torch import Tensor, nn

from metadist.distributed.partitioners import with_plain_lists
from metadist.distributed.responses import (
    Gradients,
    RemoteFailure,
    WorkerResponse,
    remote_failure,
    sum_responses,
)
from metadist.gradients import tensors_of

Call = tuple[tuple, dict]
"""The `(args, kwargs)` of one shard."""


class BatchedMapper(Protocol):
    """A function that can map several shards at once, which is faster than one by one."""

    def map_batched(self, calls: list[Call]) -> list[Any]:
        """The function's results for all calls, in order."""


class SummingMapper(Protocol):
    """A function that can sum its results over shards, which is faster than one by one."""

    def weighted_sum(
        self, calls: list[Call], weights: list[float], inputs: Sequence[Tensor]
    ) -> WorkerResponse:
        """The sum of `weight * function(*args, **kwargs)` and its gradients, in float64, detached.

        Args:
            calls: the shards.
            weights: the weight of each shard.
            inputs: the tensors with respect to which the sum is differentiated; for a mapper of
                tasks, the learner's parameters that require grad, in their order.
        """


@dataclass(frozen=True)
class WorkerRequest:
    """One worker's shards of a call.

    Attributes:
        function: the mapper. It may be a `BatchedMapper` or a `SummingMapper`.
        calls: the (args, kwargs) of each shard, run in order.
        weights: the weight of each shard, to respond with one weighted sum; None to respond with
            every result.
        grad_indices: the indices in `tensors_of(calls)` of the inputs with respect to which results
            are differentiated. None leaves gradients to the distributed autograd context, if any.
        anchor: None outside a context of distributed autograd. Inside, results keep their graph,
            and this is a zero on which the anchor of a response depends. It requires grad if a
            tensor of the call does.
        keep_device: whether results stay on their device instead of being moved to the CPU.
    """

    function: Callable[..., Any]
    calls: list[Call]
    weights: list[float] | None = None
    grad_indices: list[int] | None = None
    anchor: Tensor | None = None
    keep_device: bool = False

    def respond(self) -> list[WorkerResponse] | RemoteFailure:
        """A response for each shard, or a single one for their weighted sum.

        An exception, SystemExit included, becomes a `RemoteFailure`.
        """
        try:
            if self.anchor is None:
                return self._responses()
            from metadist.distributed import autograd  # it needs torch.distributed.autograd

            return autograd.run_in_context(self.anchor, self._responses)
        except BaseException as error:
            return remote_failure(error)

    def _responses(self) -> list[WorkerResponse]:
        inputs = None
        if self.grad_indices is not None:
            tensors = tensors_of(self.calls)
            inputs = [tensors[index].requires_grad_() for index in self.grad_indices]
        return run_shards(
            self.function, self.calls, self.weights, inputs, self._convert_leaf, copy_shared=True
        )

    def _convert_leaf(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        leaf = leaf.detach() if self.anchor is None else leaf
        return leaf if self.keep_device or leaf.is_cpu else leaf.cpu()


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def run_shards(
    function: Callable[..., Any],
    calls: Sequence[Call],
    weights: Sequence[float] | None = None,
    inputs: Sequence[Tensor] | None = None,
    convert_leaf: Callable[[Any], Any] | None = None,
    copy_shared: bool = False,
) -> list[WorkerResponse]:
    """Run a function on several shards in this process, in order.

    Args:
        function: the mapper. It may be a `BatchedMapper` or a `SummingMapper`.
        calls: the (args, kwargs) of each shard.
        weights: the weight of each shard, for one weighted sum; None for every result.
        inputs: the tensors with respect to which the scalar in each result is differentiated; None
            for no gradients.
        convert_leaf: the function applied to each leaf of the results. Default: it detaches
            tensors; a `SummingMapper` detaches its sums itself.
        copy_shared: whether shards get copies of modules, optimizers and dataclasses, which they
            may share, so that what the function changes in one shard does not affect the others.
            Mappers of several shards get no copies.

    Returns:
        A response for each shard, or a single one for their weighted sum.
    """
    convert = convert_leaf or _detached

    def convert_result(result: Any) -> Any:
        if isinstance(result, Tensor):
            return convert(result)
        return optree.tree_map(convert, with_plain_lists(result), none_is_leaf=True)

    # isinstance with a protocol would take longer than a small function.
    if inputs is not None and weights and hasattr(function, "weighted_sum"):
        response = function.weighted_sum(calls, weights, inputs)
        if convert_leaf is None:
            return [response]
        value, gradients = convert_result((response.value, response.gradients))
        return [response._replace(value=value, gradients=gradients)]
    if inputs is None and weights is None and hasattr(function, "map_batched"):
        results = function.map_batched(calls)
        return [WorkerResponse(convert_result(result), None) for result in results]
    shards: Iterator[_Shard] = ((call, inputs) for call in calls)
    of_several = hasattr(function, "map_batched") or hasattr(function, "weighted_sum")
    if copy_shared and not of_several:
        shards = _with_copies(calls, inputs)
    responses = (
        _run_shard(function, *call, shard_inputs, convert_result) for call, shard_inputs in shards
    )
    return list(responses) if weights is None else [sum_responses(responses, weights)]


_Shard = tuple[Call, Sequence[Tensor] | None]
"""A call, and the tensors with respect to which its result is differentiated."""


def _with_copies(calls: Sequence[Call], inputs: Sequence[Tensor] | None) -> Iterator[_Shard]:
    """The calls; all but the last one with copies of their modules, optimizers and dataclasses.

    Tensors of theirs that are arguments, too, are those of the copies.
    """
    for number, arguments in enumerate(calls, 1):
        leaves, structure = optree.tree_flatten(cast(Any, arguments), none_is_leaf=True)
        copied = [leaf for leaf in leaves if _is_copied(leaf) and number < len(calls)]
        # deepcopy refuses tensors with a graph.
        copies: dict[int, Any] = {id(t): t.clone() for t in tensors_of(copied) if t.grad_fn}
        try:
            copy.deepcopy(copied, copies)
        except Exception:  # a module has what RPC alone can pickle, such as an RRef
            copies.clear()
        call: Any = structure.unflatten([copies.get(id(leaf), leaf) for leaf in leaves])
        yield call, None if inputs is None else [copies.get(id(t), t) for t in inputs]


def _is_copied(argument: Any) -> bool:
    kinds = nn.Module | torch.optim.Optimizer
    return isinstance(argument, kinds) or dataclasses.is_dataclass(argument)


def _run_shard(
    function: Callable[..., Any],
    args: tuple,
    kwargs: dict,
    inputs: Sequence[Tensor] | None,
    convert_result: Callable[[Any], Any],
) -> WorkerResponse:
    if inputs is None:
        return WorkerResponse(convert_result(function(*args, **kwargs)), None)
    with torch.enable_grad():
        result = function(*args, **kwargs)
    leaves = optree.tree_leaves(result, none_is_leaf=True)
    differentiable = [
        index
        for index, leaf in enumerate(leaves)
        if isinstance(leaf, Tensor) and leaf.requires_grad
    ]
    if inputs and not differentiable and any(x.grad_fn is not None for x in tensors_of(leaves)):
        raise ValueError(
            'gradient="worker" differentiates one scalar per result (the loss), and finds none in '
            "a dataclass or module: return it in a tuple or dict, or detach it."
        )
    if not differentiable or not inputs:
        return WorkerResponse(convert_result(result), None)
    index = differentiable[0]
    if len(differentiable) > 1 or leaves[index].numel() != 1:
        raise ValueError(
            'gradient="worker" differentiates one scalar per result (the loss); this result '
            f"has {len(differentiable)} differentiable tensors, the first of shape "
            f"{tuple(leaves[index].shape)}: detach the others, or use "
            'gradient="dist_autograd".'
        )
    gradients = torch.autograd.grad(leaves[index], inputs, allow_unused=True)
    by_input = convert_result(list(gradients))
    return WorkerResponse(convert_result(result), Gradients(index, by_input))
