"""Each rank its own share, and one collective."""

from typing import Annotated, Any, Literal

import torch
from annotated_types import Gt
from torch import Tensor, nn

from metadist.distributed.collectives import (
    all_reduce,
    destroy_process_group,
    init_process_group,
)
from metadist.distributed.data_parallel import DataParallel
from metadist.distributed.phases import is_recorded, phase
from metadist.distributed.reducers import LinearReducer, finish_sum
from metadist.distributed.shards import Partitioner
from metadist.distributed.visits import Answer
from metadist.training.strategies.in_process import InProcess, set_gradient, trained
from metadist.training.strategies.strategy import Mapper


class AllReduceStrategy(InProcess):
    """Each rank runs its own shards; a collective carries out the reducer.

    Args:
        partitioner: splits a batch among the ranks.
        reducer: a weighted sum, such as the mean.
        engine: "sum" adds everything up in one all-reduce in float64, so that the numbers are
            the same in every world; "ddp" lets torch's DistributedDataParallel exchange the
            gradient in pieces, in the parameters' own type, while the last shard's backward pass
            is still under way.
        timeout_seconds: seconds that ranks may arrive apart.
        call_timeout: seconds that a collective waits for the slowest rank. Ranks that died or
            froze are found long before, by the job's `Pulse`.
    """

    name = "allreduce"

    def __init__(
        self,
        partitioner: Partitioner,
        reducer: LinearReducer,
        engine: Literal["sum", "ddp"] = "sum",
        timeout_seconds: Annotated[float, Gt(0)] = 30.0,
        call_timeout: Annotated[float, Gt(0)] = 3600.0,
    ) -> None:
        super().__init__(partitioner, reducer)
        self.engine = engine
        self.timeout_seconds = timeout_seconds
        self.call_timeout = call_timeout
        self._ddp: DataParallel | None = None

    def open(self) -> None:
        """Open the process group."""
        init_process_group(timeout=self.call_timeout, meeting_timeout=self.timeout_seconds)

    def close(self, graceful: bool = True) -> None:
        """Leave the process group, after the slowest rank when graceful."""
        self._ddp = None
        try:
            if graceful:
                all_reduce(0.0)
        finally:
            destroy_process_group()

    def runs_loop(self) -> bool:
        """Yes, on every rank alike."""
        return True

    def backward(self, mapper: Mapper, learner: nn.Module, batch: Any) -> Any:
        """See `Strategy`. Every rank gets the same result and the same gradient."""
        if self.engine == "ddp":
            calls, weights, divisor = self._my_calls(learner, batch)
            if self._ddp is None or self._ddp.module is not learner:
                self._ddp = DataParallel(learner)
            with phase("backward"):
                part, types = self._ddp.backward(mapper, calls, weights, divisor)
            with phase("reduce"):
                return finish_sum(all_reduce(part), divisor, types)
        answer, part, divisor = self._backward(mapper, learner, batch)
        if is_recorded():  # waiting for the slowest rank, told apart from the exchange
            with phase("wait"):
                all_reduce(0.0)
        with phase("reduce"):
            return self._reduced(answer, part, divisor, learner)

    def _reduced(
        self,
        answer: Answer,
        part: list[Tensor | None],
        divisor: float | None,
        learner: nn.Module,
    ) -> Any:
        filled = [
            torch.zeros_like(parameter, dtype=torch.float64) if gradient is None else gradient
            for parameter, gradient in zip(trained(learner), part, strict=True)
        ]
        found = [float(gradient is not None) for gradient in part]
        value, gradient, found = all_reduce((answer.value, filled, found))
        set_gradient(
            learner,
            [g if ranks else None for g, ranks in zip(gradient, found, strict=True)],
            divisor,
        )
        return finish_sum(value, divisor, answer.dtypes)

    def collect(self, mapper: Mapper, learner: nn.Module, batch: Any) -> dict[str, Tensor]:
        """See `Strategy`. Every rank gets all figures."""
        figures, shards = self._figures(mapper, learner, batch)
        # A shard has as many items as it has figures, whatever its partitioner says.
        lengths = torch.zeros(shards, dtype=torch.int64)
        for shard, found in figures.items():
            if shard >= 0:
                lengths[shard] = len(next(iter(found.values())))
        ends = all_reduce(lengths).cumsum(0).tolist()
        some = next(iter(figures.values()))
        whole = {name: each.new_zeros(ends[-1], *each.shape[1:]) for name, each in some.items()}
        for shard, found in figures.items():
            for name, values in found.items() if shard >= 0 else ():
                whole[name][ends[shard] - len(values) : ends[shard]] = values
        return all_reduce(whole)

    def agree(self, flag: bool) -> bool:
        """See `Strategy`."""
        return all_reduce(float(flag)) > 0
