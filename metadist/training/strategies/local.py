"""Strategies that compute this rank's shards in this process, and `strategy=local`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor, nn

from metadist.algorithms.functional import parameters_by_name
from metadist.distributed import get_rank, get_worker_id, get_world_size
from metadist.distributed.partitioners import Partitioner, WorkerID, as_shards
from metadist.distributed.reducers import LinearReducer, finish_sum
from metadist.distributed.worker_request import Call, run_shards
from metadist.errors import UserError
from metadist.training.strategies.strategy import (
    Mapper,
    StopRequested,
    Strategy,
    concatenate_shards,
    never,
)


class _RankShards(NamedTuple):
    """The shards of a rank.

    A rank without shards of its own computes the first shard with weight zero, so that its part of
    the sum has the right structure and types. The other ranks take as long anyway.

    Attributes:
        indices: indices of the rank's shards among all shards; [] if it has none.
        calls: the mapper's arguments for each shard.
        weights: the weight of each shard in the sum over all ranks.
        divisor: the number by which that sum is divided; None for a sum.
        total: the number of shards of all ranks.
    """

    indices: list[int]
    calls: list[Call]
    weights: list[float]
    divisor: float | None
    total: int


class _PartialSums(NamedTuple):
    """A rank's part of the sums over all ranks, in float64.

    Attributes:
        value: the sum of the mapper's results.
        dtypes: the final types of its leaves.
        trainable: the parameters that require grad.
        gradient: the gradient with respect to each of them; None where no result depends on it.
        divisor: the number by which the sums are divided; None for a sum.
    """

    value: Any
    dtypes: list[torch.dtype | None]
    trainable: list[nn.Parameter]
    gradient: list[Tensor | None]
    divisor: float | None


class InProcessStrategy(Strategy):
    """Runs this rank's shards in this process.

    Raises:
        UserError: the reducer is not a `LinearReducer`.
    """

    reducer: LinearReducer

    def __init__(self, partitioner: Partitioner, reducer: Callable[[list], Any]) -> None:
        super().__init__(partitioner, reducer)
        if not isinstance(reducer, LinearReducer):
            raise UserError(
                f"strategy={self.name} adds up weighted results, which the reducer "
                f"{type(reducer).__name__} does not: "
                "choose reducer=mean or reducer=sum, or strategy=rpc."
            )

    def _shards_of_rank(self, learner: nn.Module, batch: Any) -> _RankShards:
        shards = as_shards(self.partitioner(learner, batch))
        sizes = [shard.size for shard in shards]
        weights = self.reducer.weights(sizes)
        indices = _indices_of_rank([worker for worker, _, _ in shards])
        return _RankShards(
            indices,
            [(shards[i][1], shards[i][2]) for i in indices or [0]],
            [weights[i] for i in indices] or [0 * weights[0]],
            self.reducer.divisor(sizes),
            len(shards),
        )

    def _partial_sums(self, mapper: Mapper, learner: nn.Module, batch: Any) -> _PartialSums:
        trainable = []
        for parameter in parameters_by_name(learner).values():
            parameter.grad = None  # also of parameters that no longer require grad
            if parameter.requires_grad:
                trainable.append(parameter)
        shards = self._shards_of_rank(learner, batch)
        (response,) = run_shards(mapper, shards.calls, shards.weights, trainable)
        value, dtypes = response.value, response.dtypes or []
        gradient: list[Tensor | None] = [None] * len(trainable)
        if response.gradients is not None:
            gradient = list(response.gradients.by_input)
        if not any(shards.weights):  # zero times infinity would not be zero
            value = _zeros_like(value)
            gradient = [None if part is None else torch.zeros_like(part) for part in gradient]
        return _PartialSums(value, dtypes, trainable, gradient, shards.divisor)


class LocalStrategy(InProcessStrategy):
    """Computes everything in this process.

    See `Strategy` for the arguments.
    """

    name = "local"

    def open(self) -> None:
        """Check that there is one process.

        Raises:
            UserError: there are several processes.
        """
        if get_world_size() > 1:
            raise UserError(
                f"strategy=local runs in one process, but torchrun started {get_world_size()}: "
                "choose strategy=rpc or strategy=allreduce, or start with python, without "
                "launcher=torchrun."
            )

    def close(self, graceful: bool = True) -> None:
        """Does nothing."""

    def forward_backward(
        self, mapper: Mapper, learner: nn.Module, batch: Any, stop_requested: StopRequested = never
    ) -> tuple[Any, bool]:
        """See `Strategy`."""
        sums = self._partial_sums(mapper, learner, batch)
        set_gradient(sums.trainable, sums.gradient, sums.divisor)
        return finish_sum(sums.value, sums.divisor, sums.dtypes), stop_requested()

    def map_tasks(self, mapper: Mapper, learner: nn.Module, batch: Any) -> dict[str, Tensor]:
        """See `Strategy`."""
        calls = self._shards_of_rank(learner, batch).calls
        return concatenate_shards(learner, [r.value for r in run_shards(mapper, calls)])


def _zeros_like(tree: Any) -> Any:
    def zero(leaf: Any) -> Any:
        return torch.zeros_like(leaf) if isinstance(leaf, Tensor) else 0 * leaf

    return optree.tree_map(zero, tree)


def _indices_of_rank(workers: list[WorkerID]) -> list[int]:
    """The indices of the entries of a list of workers that name this rank."""
    rank = get_rank()
    own_workers = {worker for worker in set(workers) if get_worker_id(worker) == rank}
    return [i for i, worker in enumerate(workers) if worker in own_workers]


def set_gradient(
    trainable: list[nn.Parameter], gradient: list[Tensor | None], divisor: float | None
) -> None:
    """Divide the sums and put them into `.grad`, in the parameters' own type and layout."""
    for parameter, part in zip(trainable, gradient, strict=True):
        if part is None:
            parameter.grad = None
        else:
            grad = torch.empty_like(parameter, requires_grad=False)
            parameter.grad = torch.div(part.to(parameter.device), divisor or 1, out=grad)
