"""What `local` and `allreduce` share: running this rank's shards in this process."""

from typing import Any, Literal

from torch import Tensor, nn

from metadist.distributed import get_rank, get_worker_id
from metadist.distributed.partitioners import Partitioner, WorkerID, as_shards
from metadist.distributed.reducers import LinearReducer
from metadist.distributed.worker_calls import WorkerRequest, WorkerResponse, tensors_of
from metadist.training.strategies.strategy import Mapper


class InProcess:
    """Runs this rank's shards, one after the other."""

    home: Literal["cpu", "device"] = "device"

    def __init__(self, partitioner: Partitioner, reducer: LinearReducer) -> None:
        self.partitioner = partitioner
        self.reducer = reducer

    def _my_calls(
        self, learner: nn.Module, batch: Any
    ) -> tuple[list[tuple[tuple, dict]], list[float]]:
        """This rank's shards as calls of the mapper, and their weights in the reduced result."""
        shards = as_shards(self.partitioner(learner, batch))
        coefficients = self.reducer.coefficients([shard.size for shard in shards])
        mine = _mine([worker for worker, _, _ in shards])
        if mine:
            return [(shards[i][1], shards[i][2]) for i in mine], [coefficients[i] for i in mine]
        # A rank without work repeats the first shard with weight zero: its contribution then has
        # the right structure and types, and the others take as long anyway.
        return [(shards[0][1], shards[0][2])], [0 * coefficients[0]]

    def _backward(
        self, mapper: Mapper, learner: nn.Module, batch: Any
    ) -> tuple[WorkerResponse, list[Tensor | None]]:
        """This rank's part of the reduced result and of the gradient, both in float64."""
        calls, weights = self._my_calls(learner, batch)
        parameters = trained(learner)
        places = {id(tensor): place for place, tensor in enumerate(tensors_of(calls))}
        differentiate = [places[id(parameter)] for parameter in parameters]
        (response,) = WorkerRequest(mapper, calls, weights, differentiate, keep_device=True).run()
        assert response.gradients is not None, "the mapper's loss does not depend on the learner"
        return response, response.gradients.by_input

    def _figures(
        self, mapper: Mapper, learner: nn.Module, batch: Any
    ) -> tuple[dict[int, dict[str, Tensor]], int]:
        """The figures of this rank's shards by the shards' numbers, and how many shards there are.
        A rank without work has those of the first shard, under the number -1.
        """
        shards = as_shards(self.partitioner(learner, batch))
        mine = _mine([worker for worker, _, _ in shards])
        calls = [(shards[i][1], shards[i][2]) for i in mine or [0]]
        responses = WorkerRequest(mapper, calls, keep_device=True).run()
        figures = [response.value for response in responses]
        return dict(zip(mine or [-1], figures, strict=True)), len(shards)


def _mine(workers: list[WorkerID]) -> list[int]:
    """The places in a list of workers that are this rank's."""
    rank = get_rank()
    mine = {worker for worker in set(workers) if get_worker_id(worker) == rank}
    return [place for place, worker in enumerate(workers) if worker in mine]


def trained(learner: nn.Module) -> list[nn.Parameter]:
    """The parameters that training changes."""
    return [parameter for parameter in learner.parameters() if parameter.requires_grad]


def set_gradient(learner: nn.Module, gradient: list[Tensor | None]) -> None:
    """A parameter on which no task's loss depends gets None, as from `loss.backward()`."""
    for parameter, piece in zip(trained(learner), gradient, strict=True):
        parameter.grad = None if piece is None else piece.to(parameter)
