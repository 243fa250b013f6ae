"""One visit to a worker: the shards of a call that are its share, run one after the other.

A worker gets all its shards in one message. What they share (a model, say) crosses once, because
one pickle holds it once, and however many shards there are, a visit occupies one thread. With a
linear reducer the worker adds its results up before it answers.
"""

import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import optree
import torch
from torch import Tensor, nn

from metadist.distributed import autograd
from metadist.distributed.reducers import leaf_dtypes, to_float64, weighted_sum
from metadist.distributed.world import get_rank, host_name
from metadist.errors import UserError


class Gradients(NamedTuple):
    """A result's derivative: of the one differentiable scalar in it, by each asked-for input.

    Attributes:
        leaf: the scalar's place among the result's leaves.
        by_input: a tensor for each input, None where the scalar does not depend on it.
    """

    leaf: int
    by_input: list[Tensor | None]


class Answer(NamedTuple):
    """What a visit answers for one shard, or for the sum of its shards.

    Attributes:
        value: the function's result; a sum has its real tensors in float64.
        gradients: its derivative, in float64 for a sum; None if none was asked for or there is
            none.
        dtypes: for a sum, the types that its leaves shall have in the end.
    """

    value: Any
    gradients: Gradients | None
    dtypes: list[torch.dtype | None] | None = None


class Failure(NamedTuple):
    """What a function raised on its worker, as text: exceptions do not survive the journey.

    Attributes:
        kind: the exception's class.
        message: its text.
        traceback: as Python prints it.
        of_user: whether it was a `UserError`.
        where: the worker's rank and machine, " (rank 1 on host)".
    """

    kind: str
    message: str
    traceback: str
    of_user: bool
    where: str = ""


Call = tuple[tuple, dict]
"""(args, kwargs) of one shard."""


class Several(Protocol):
    """A function that maps several shards at once, where that is faster than one by one."""

    def several(self, calls: list[Call]) -> list[Any]:
        """What the function returns for each of the calls."""


class WeightedSum(Protocol):
    """A function that adds its own shards up, where that is faster than one by one."""

    def weighted_sum(self, calls: list[Call], weights: list[float], inputs: list[Tensor]) -> Answer:
        """The sum of `weight * function(*args, **kwargs)` and its derivative, in float64.

        Args:
            calls: the shards.
            weights: how often each counts.
            inputs: what to differentiate by.
        """


@dataclass(frozen=True)
class Visit:
    """One worker's share of a call; callable on the worker.

    Attributes:
        function: the mapper.
        calls: (args, kwargs) of each shard.
        weights: how often each shard counts, to answer with one weighted sum; None to answer
            with every result.
        differentiate: places, among `tensors_of(calls)`, of the inputs to differentiate by.
            None leaves derivatives to the distributed autograd context, if there is one.
        in_context: results keep their graph, which a context records across the workers.
        keep_device: leave results where they are (device maps carry them) instead of moving
            them to the CPU.
        alone: the call is this one visit, to a worker that the caller named.
    """

    function: Callable[..., Any]
    calls: list[tuple[tuple, dict]]
    weights: list[float] | None = None
    differentiate: list[int] | None = None
    in_context: bool = False
    keep_device: bool = False
    alone: bool = False

    def run(self) -> list[Answer]:
        """An answer for each shard, or a single one for their weighted sum."""
        if not self.in_context:
            return self._answers()
        with autograd.serving() as whole:
            return whole(self._answers())

    def _answers(self) -> list[Answer]:
        inputs: list[Tensor] | None = None
        if self.differentiate is not None:
            everything = tensors_of(self.calls)
            inputs = [everything[place].requires_grad_() for place in self.differentiate]
        function, weights = self.function, self.weights
        # To ask whether it is an instance of a protocol takes longer than a small function.
        if inputs is not None and weights and hasattr(function, "weighted_sum"):
            return [self._sent(function.weighted_sum(self.calls, weights, inputs))]
        if inputs is None and weights is None and hasattr(function, "several"):
            return [Answer(self._home(result), None) for result in function.several(self.calls)]
        answers = (self._shard(args, kwargs, inputs) for args, kwargs in self.calls)
        if weights is None:
            return list(answers)
        return [_add_up(answers, weights)]

    def answer(self) -> list[Answer] | Failure:
        """The same as `run`, with what was raised as a `Failure`."""
        try:
            return self.run()
        except Exception as error:
            return Failure(
                type(error).__name__,
                str(error),
                traceback.format_exc(),
                isinstance(error, UserError),
                f" (rank {get_rank()} on {host_name()})",
            )

    def _sent(self, answer: Answer) -> Answer:
        gradients = answer.gradients
        if gradients is not None:
            gradients = gradients._replace(by_input=self._home(gradients.by_input))
        return answer._replace(value=self._home(answer.value), gradients=gradients)

    def _home(self, result: Any) -> Any:
        def ready(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            leaf = leaf if self.in_context else leaf.detach()
            return leaf if self.keep_device or leaf.is_cpu else leaf.cpu()

        if isinstance(result, Tensor):
            return ready(result)
        return optree.tree_map(ready, result, none_is_leaf=True)

    def _shard(self, args: tuple, kwargs: dict, inputs: list[Tensor] | None) -> Answer:
        if inputs is None:
            return Answer(self._home(self.function(*args, **kwargs)), None)
        with torch.enable_grad():
            result = self.function(*args, **kwargs)
        leaves = optree.tree_leaves(result, none_is_leaf=True)
        differentiable = [
            place
            for place, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor) and leaf.requires_grad
        ]
        if not differentiable:
            return Answer(self._home(result), None)
        place = differentiable[0]
        if len(differentiable) > 1 or leaves[place].numel() != 1:
            raise ValueError(
                'gradient="visit" differentiates one scalar a result (the loss); this result '
                f"has {len(differentiable)} differentiable tensors, the first of shape "
                f"{tuple(leaves[place].shape)}: detach the others, or use gradient='context'."
            )
        found = torch.autograd.grad(leaves[place], inputs, allow_unused=True)
        return Answer(self._home(result), Gradients(place, self._home(list(found))))


def _add_up(answers: Iterator[Answer], weights: Sequence[float]) -> Answer:
    """The weighted sum of answers, taken one at a time, so that only one shard's graph and one
    shard's gradient are alive beside the sum.
    """
    values: list[Any] = []
    total: Gradients | None = None
    for (value, gradients, _), weight in zip(answers, weights, strict=True):
        values.append(value)
        if gradients is None:
            continue
        if total is None:
            total = Gradients(gradients.leaf, [None] * len(gradients.by_input))
        for place, gradient in enumerate(gradients.by_input):
            so_far = total.by_input[place]
            if gradient is None:
                continue
            if so_far is None:
                total.by_input[place] = to_float64(gradient) * weight
            else:
                so_far.add_(to_float64(gradient), alpha=weight)
    return Answer(weighted_sum(values, weights), total, leaf_dtypes(values[0]))


def tensors_of(tree: Any) -> list[Tensor]:
    """Every tensor in a structure, each once, in an order that pickling keeps.

    Modules count with their parameters; their buffers do not.
    """
    found: dict[int, Tensor] = {}
    modules: set[int] = set()
    for leaf in optree.tree_leaves(tree, none_is_leaf=True):
        if isinstance(leaf, Tensor):
            found.setdefault(id(leaf), leaf)
        elif isinstance(leaf, nn.Module) and id(leaf) not in modules:
            modules.add(id(leaf))  # it may be in every call: to walk it takes its time
            for parameter in leaf.parameters():
                found.setdefault(id(parameter), parameter)
    return list(found.values())
