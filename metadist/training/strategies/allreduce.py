"""`strategy=allreduce`: every rank computes its own shards, and one all-reduce sums them."""

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, Literal

import optree
import torch
from annotated_types import Gt, Le
from torch import Tensor, nn

from metadist.algorithms.learner import require_equal_metrics
from metadist.distributed import get_rank
from metadist.distributed.collectives import (
    all_gather,
    all_reduce,
    broadcast,
    destroy_process_group,
    init_process_group,
)
from metadist.distributed.hierarchy import FLAT_UP_TO
from metadist.distributed.partitioners import Partitioner
from metadist.distributed.reducers import LinearReducer, finish_sum
from metadist.distributed.store import RENDEZVOUS_TIMEOUT
from metadist.distributed.transport import MAX_TIMEOUT
from metadist.distributed.worker_request import run_shards
from metadist.errors import UserError
from metadist.profile_ranges import profile_range
from metadist.training.strategies.local import InProcessStrategy, set_gradient
from metadist.training.strategies.strategy import (
    Mapper,
    StopRequested,
    never,
)

if TYPE_CHECKING:
    from metadist.distributed.data_parallel import DataParallel


class AllReduceStrategy(InProcessStrategy):
    """Every rank computes its own shards; an all-reduce sums results and gradients.

    Args:
        partitioner: splits a batch among the ranks.
        reducer: a weighted sum, such as the mean.
        engine: "sum" uses one all-reduce in float64, so that the bits do not depend on the number
            of ranks. "ddp" uses torch's DistributedDataParallel, which exchanges the gradient in
            buckets, in the parameters' own type, during the last shard's backward pass.
        flat_up_to: largest number of ranks for which a sum over Gloo is one collective over all
            ranks. More ranks sum within groups first, then between the groups. A group is a node,
            or about the square root of the number of ranks.
        shared_memory: whether the ranks of a single machine sum in shared memory on CPUs, where
            that is possible, instead of over Gloo.
        rendezvous_timeout_seconds: seconds by which the ranks' starts may differ.
        call_timeout: seconds that a collective waits for the slowest rank. Ranks that died or
            froze are found long before, by the job's heartbeat.
        device: the device of this rank's learner. Default: the GPU of the local rank if there is
            one, else the CPU.
    """

    name = "allreduce"

    def __init__(
        self,
        partitioner: Partitioner,
        reducer: LinearReducer,
        engine: Literal["sum", "ddp"] = "sum",
        flat_up_to: Annotated[int, Gt(0)] = FLAT_UP_TO,
        shared_memory: bool = True,
        rendezvous_timeout_seconds: Annotated[float, Gt(0)] = RENDEZVOUS_TIMEOUT,
        call_timeout: Annotated[float, Gt(0), Le(MAX_TIMEOUT)] = 3600.0,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(partitioner, reducer)
        self.engine = engine
        self.flat_up_to = flat_up_to
        self.shared_memory = shared_memory
        self.rendezvous_timeout_seconds = rendezvous_timeout_seconds
        self.call_timeout = call_timeout
        self.device = device
        self._ddp: DataParallel | None = None
        self._checked: tuple[Mapper, Any] | None = None

    @property
    def sums_on_workers(self) -> bool:
        """True with the engine "sum" only."""
        return self.engine == "sum"

    def open(self) -> None:
        """Open the process group."""
        init_process_group(
            timeout=self.call_timeout,
            rendezvous_timeout=self.rendezvous_timeout_seconds,
            flat_up_to=self.flat_up_to,
            shared_memory=self.shared_memory,
            device=self.device,
        )

    def close(self, graceful: bool = True) -> None:
        """Leave the process group, after the slowest rank when graceful."""
        self._ddp = None
        try:
            if graceful:
                self.barrier()
        except BaseException:
            graceful = False
            raise
        finally:
            destroy_process_group(graceful)

    def forward_backward(
        self, mapper: Mapper, learner: nn.Module, batch: Any, stop_requested: StopRequested = never
    ) -> tuple[Any, bool]:
        """See `Strategy`. One all-reduce in float64 sums results, gradients and stop requests."""
        if self.engine == "ddp":
            return self._backward_ddp(mapper, learner, batch, stop_requested)
        sums = self._partial_sums(mapper, learner, batch)
        self._check_structure(mapper, sums.value)
        with profile_range("reduce"):
            filled = [
                torch.zeros_like(parameter, dtype=torch.float64) if part is None else part
                for parameter, part in zip(sums.trainable, sums.gradient, strict=True)
            ]
            # Flags in the type and on the device of the gradient, so that one collective suffices.
            flags = (filled or [sums.value.loss])[0].new_tensor(
                [*(part is not None for part in sums.gradient), stop_requested()]
            )
            value, filled, flags = all_reduce((sums.value, filled, flags), check=False)
            *counts, stops = flags.tolist()
            gradient = [g if count else None for g, count in zip(filled, counts, strict=True)]
            set_gradient(sums.trainable, gradient, sums.divisor)
            return finish_sum(value, sums.divisor, sums.dtypes), stops > 0

    def _backward_ddp(
        self, mapper: Mapper, learner: nn.Module, batch: Any, stop_requested: StopRequested
    ) -> tuple[Any, bool]:
        """Sum gradients by DistributedDataParallel, results and stop requests by an all-reduce."""
        from metadist.distributed.data_parallel import DataParallel

        shards = self._shards_of_rank(learner, batch)
        if self._ddp is None or not self._ddp.matches(learner):
            self._ddp = DataParallel(learner)
        part, dtypes = self._ddp.backward(mapper, shards.calls, shards.weights, shards.divisor)
        self._check_structure(mapper, part)
        with profile_range("reduce"):
            stops = part.loss.new_tensor(float(stop_requested()))
            part, stops = all_reduce((part, stops), check=False)
            return finish_sum(part, shards.divisor, dtypes), bool(stops)

    def _check_structure(self, mapper: Mapper, result: Any) -> None:
        """Require that the results of all ranks, which are summed, have the same structure.

        The first results are compared between ranks, later ones with the first.
        """
        leaves, tree = optree.tree_flatten(result, none_is_leaf=True)
        structure = (tree, [getattr(leaf, "shape", ()) for leaf in leaves])
        if self._checked is None or self._checked[0] is not mapper:
            self._require_equal(str(structure))
            self._checked = mapper, structure
        elif structure != self._checked[1]:
            raise UserError(_different_structure([get_rank()], "the results before"))

    def _require_equal(self, structure: str) -> None:
        """Raise an error on all ranks if the structure of their results differs."""
        different = _ranks_that_differ(structure.encode())
        if different:
            raise UserError(_different_structure(different, "those of rank 0"))

    def map_tasks(self, mapper: Mapper, learner: nn.Module, batch: Any) -> dict[str, Tensor]:
        """See `Strategy`."""
        shards = self._shards_of_rank(learner, batch)
        values = [response.value for response in run_shards(mapper, shards.calls)]
        require_equal_metrics(learner, values)
        first = values[0]
        self._require_equal(str(sorted((name, part.shape[1:]) for name, part in first.items())))
        indexed = list(zip(shards.indices, values, strict=False))  # [] without own shards
        # Not every partitioner reports shard sizes, so lengths come from the values.
        lengths = {name: torch.zeros(shards.total, dtype=torch.int64) for name in first}
        for index, shard in indexed:
            for name, part in shard.items():
                lengths[name][index] = len(part)
        ends = {name: length.cumsum(0).tolist() for name, length in all_reduce(lengths).items()}
        # The sum of -0.0 and a number is that number, also if it is -0.0.
        whole = {
            n: part.new_full((ends[n][-1], *part.shape[1:]), -0.0) for n, part in first.items()
        }
        for index, shard in indexed:
            for name, part in shard.items():
                whole[name][ends[name][index] - len(part) : ends[name][index]] = part
        return {n: tensor.to(first[n].dtype) for n, tensor in all_reduce(whole).items()}

    def any_rank(self, flag: bool) -> bool:
        """See `Strategy`."""
        return all_reduce(float(flag), check=False) > 0

    def barrier(self) -> None:
        """See `Strategy`."""
        all_reduce(0.0, check=False)

    def broadcast_module(self, module: nn.Module) -> None:
        """See `Strategy`."""
        parameters = list(module.parameters())
        tensors = [*parameters, *module.buffers()]
        if not tensors:
            return
        flags = torch.tensor([p.requires_grad for p in parameters], device=tensors[0].device)
        with torch.no_grad():
            *copies, flags = broadcast([*(tensor.detach() for tensor in tensors), flags])
            for tensor, copy in zip(tensors, copies, strict=True):
                tensor.copy_(copy)
        for parameter, requires_grad in zip(parameters, flags.tolist(), strict=True):
            parameter.requires_grad_(bool(requires_grad))

    def check_replicas(self, tensors: Iterable[Tensor], iteration: int) -> None:
        """See `Strategy`."""
        digest = hashlib.sha256()
        for tensor in tensors:
            digest.update(
                tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
            )
        if different := _ranks_that_differ(digest.digest()):
            raise UserError(
                f"after iteration {iteration} the parameters or optimizer state of ranks "
                f"{different} differ from rank 0's: all ranks need the same processor type, the "
                "same versions and, to resume, the same checkpoint; resume from a checkpoint."
            )


def _ranks_that_differ(content: bytes) -> list[int]:
    """The ranks whose content differs from rank zero's. Every rank calls it."""
    digest = int.from_bytes(hashlib.sha256(content).digest()[:7], "big")
    digests = all_gather(torch.tensor([digest]))
    return [rank for rank, d in enumerate(digests) if not torch.equal(d, digests[0])]


def _different_structure(ranks: list[int], others: str) -> str:
    return (
        f"the results of ranks {ranks} have other metrics or shapes than {others}: return the same "
        "metrics, of the same shapes, for every task."
    )
