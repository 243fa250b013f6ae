"""What `local` and `allreduce` share: running this rank's shards in this process."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from metadist.distributed import get_rank, get_worker_id
from metadist.distributed.reducers import LinearReducer
from metadist.distributed.shards import Partitioner, WorkerID, as_shards
from metadist.distributed.visits import Answer, Visit, tensors_of
from metadist.training.strategies.strategy import Mapper


class InProcess:
    """Runs this rank's shards, one after the other."""

    home: Literal["cpu", "device"] = "device"

    def __init__(self, partitioner: Partitioner, reducer: LinearReducer) -> None:
        self.partitioner = partitioner
        self.reducer = reducer

    def _my_calls(
        self, learner: nn.Module, batch: Any
    ) -> tuple[list[tuple[tuple, dict]], list[float], float | None]:
        """This rank's shards as calls of the mapper, how often each counts in the sum of all ranks,
        and what that sum is divided by.
        """
        shards = as_shards(self.partitioner(learner, batch))
        sizes = [shard.size for shard in shards]
        weights, divisor = self.reducer.weights(sizes), self.reducer.divisor(sizes)
        mine = _mine([worker for worker, _, _ in shards])
        if mine:
            calls = [(shards[i][1], shards[i][2]) for i in mine]
            return calls, [weights[i] for i in mine], divisor
        # A rank without work repeats the first shard with weight zero: its contribution then has
        # the right structure and types, and the others take as long anyway.
        return [(shards[0][1], shards[0][2])], [0 * weights[0]], divisor

    def _backward(
        self, mapper: Mapper, learner: nn.Module, batch: Any
    ) -> tuple[Answer, list[Tensor | None], float | None]:
        """This rank's part of the sum of results and of gradients, both in float64, and what the
        sums of all ranks are divided by.
        """
        calls, weights, divisor = self._my_calls(learner, batch)
        parameters = trained(learner)
        places = {id(tensor): place for place, tensor in enumerate(tensors_of(calls))}
        differentiate = [places[id(parameter)] for parameter in parameters]
        (answer,) = Visit(mapper, calls, weights, differentiate, keep_device=True).run()
        assert answer.gradients is not None, "the mapper's loss does not depend on the learner"
        return answer, answer.gradients.by_input, divisor

    def _figures(
        self, mapper: Mapper, learner: nn.Module, batch: Any
    ) -> tuple[dict[int, dict[str, Tensor]], int]:
        """The figures of this rank's shards by the shards' numbers, and how many shards there are.
        A rank without work has those of the first shard, under the number -1.
        """
        shards = as_shards(self.partitioner(learner, batch))
        mine = _mine([worker for worker, _, _ in shards])
        calls = [(shards[i][1], shards[i][2]) for i in mine or [0]]
        answers = Visit(mapper, calls, keep_device=True).run()
        figures = [answer.value for answer in answers]
        return dict(zip(mine or [-1], figures, strict=True)), len(shards)


def _mine(workers: list[WorkerID]) -> list[int]:
    """The places in a list of workers that are this rank's."""
    rank = get_rank()
    mine = {worker for worker in set(workers) if get_worker_id(worker) == rank}
    return [place for place, worker in enumerate(workers) if worker in mine]


def trained(learner: nn.Module) -> list[nn.Parameter]:
    """The parameters that training changes."""
    return [parameter for parameter in learner.parameters() if parameter.requires_grad]


def set_gradient(learner: nn.Module, gradient: list[Tensor | None], divisor: float | None) -> None:
    """Divide the sums and put them into `.grad`, in the parameters' own type and layout.

    A parameter on which no task's loss depends gets None, as from `loss.backward()`.
    """
    for parameter, piece in zip(trained(learner), gradient, strict=True):
        if piece is None:
            parameter.grad = None
        else:
            parameter.grad = torch.empty_like(parameter).copy_(piece / (divisor or 1))
