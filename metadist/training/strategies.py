"""Strategies: how a meta-batch is carried out. All give the same loss and the same gradient.

A strategy takes a mapper `(learner, batch) -> result`, splits the batch with the partitioner and
combines the results with the reducer; what differs is where the mapper runs.
"""

from collections.abc import Callable
from typing import Any, Literal, Protocol

import optree
import torch
from torch import Tensor, nn

from metadist.distributed import (
    autograd,
    get_rank,
    get_worker_id,
    get_world_size,
    init_rpc,
    module_clone,
    remote_sync_call,
    shutdown_rpc,
)
from metadist.distributed.collectives import (
    all_reduce,
    destroy_process_group,
    init_process_group,
)
from metadist.distributed.data_parallel import DataParallel
from metadist.distributed.reducers import LinearReducer, narrow
from metadist.distributed.shards import Partitioner, as_shards
from metadist.distributed.visits import Answer, Visit, tensors_of
from metadist.errors import UserError

Mapper = Callable[[nn.Module, Any], Any]


class Strategy(Protocol):
    """How a meta-batch is carried out.

    Attributes:
        name: "local", "rpc" or "allreduce".
        partitioner: splits a batch among the workers.
        reducer: combines the shards' results.
        home: where the learner's parameters live: "cpu", or "device" for each rank's own device.
    """

    name: str
    partitioner: Partitioner
    reducer: Callable[[list], Any]
    home: Literal["cpu", "device"]

    def open(self) -> None:
        """Join the other ranks. Every rank calls it."""

    def close(self, graceful: bool = True) -> None:
        """Leave. With `graceful`, every rank calls it, and it returns when all have."""

    def runs_loop(self) -> bool:
        """Whether this rank runs the training loop; the others only serve until `close`."""

    def backward(self, mapper: Mapper, learner: nn.Module, batch: Any) -> Any:
        """Map, reduce, differentiate: the gradient of the reduced loss goes to `.grad`.

        Called by the ranks that run the loop. `.grad` is replaced, not added to.

        Returns:
            The reduced result, detached.
        """

    def collect(self, mapper: Mapper, learner: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Map without derivatives; each figure of all items, in the batch's order."""

    def agree(self, flag: bool) -> bool:
        """Whether any rank that runs the loop says so. All of them call it."""


class _InProcess:
    """What `local` and `allreduce` share: running shards in this process."""

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
        mine = [i for i, shard in enumerate(shards) if get_worker_id(shard[0]) == get_rank()]
        if mine:
            return [(shards[i][1], shards[i][2]) for i in mine], [coefficients[i] for i in mine]
        # A rank without work repeats the first shard with weight zero: its contribution then has
        # the right structure, and the others take as long anyway.
        return [(shards[0][1], shards[0][2])], [0.0]

    def _backward(
        self, mapper: Mapper, learner: nn.Module, batch: Any
    ) -> tuple[Answer, list[Tensor | None]]:
        """This rank's part of the reduced result and of the gradient, both in float64."""
        calls, weights = self._my_calls(learner, batch)
        parameters = _trained(learner)
        places = {id(tensor): place for place, tensor in enumerate(tensors_of(calls))}
        differentiate = [places[id(parameter)] for parameter in parameters]
        (answer,) = Visit(mapper, calls, weights, differentiate, keep_device=True).run()
        assert answer.gradients is not None, "the mapper's loss does not depend on the learner"
        return answer, answer.gradients.by_input

    def _collect(
        self, mapper: Mapper, learner: nn.Module, batch: Any
    ) -> tuple[dict[str, Tensor], list[tuple[int, int]], int]:
        """This rank's figures, the item ranges that they belong to, and the number of items."""
        shards = as_shards(self.partitioner(learner, batch))
        figures, ranges, start = [], [], 0
        for worker, args, kwargs in shards:
            size = int(shards[len(ranges)].size)
            ranges.append((start, start + size))
            if get_worker_id(worker) == get_rank():
                figures.append((mapper(*args, **kwargs), ranges[-1]))
            start += size
        if not figures:
            figures.append((mapper(*shards[0][1], **shards[0][2]), (0, 0)))
        joined = {
            name: torch.cat([values[name][: stop - first] for values, (first, stop) in figures])
            for name in figures[0][0]
        }
        return joined, [span for _, span in figures], start


class LocalStrategy(_InProcess):
    """Everything in this process, one shard after the other."""

    name = "local"

    def open(self) -> None:
        """Nothing to join.

        Raises:
            UserError: there are several processes.
        """
        if get_world_size() > 1:
            raise UserError(
                f"strategy=local runs in one process, but torchrun started {get_world_size()}: "
                "choose strategy=rpc or strategy=allreduce, or start with python."
            )

    def close(self, graceful: bool = True) -> None:
        """Nothing to leave."""

    def runs_loop(self) -> bool:
        """Yes."""
        return True

    def backward(self, mapper: Mapper, learner: nn.Module, batch: Any) -> Any:
        """See `Strategy`."""
        answer, gradient = self._backward(mapper, learner, batch)
        _set_gradient(learner, gradient)
        return narrow(answer.value, answer.dtypes)

    def collect(self, mapper: Mapper, learner: nn.Module, batch: Any) -> dict[str, Tensor]:
        """See `Strategy`."""
        return self._collect(mapper, learner, batch)[0]

    def agree(self, flag: bool) -> bool:
        """The flag."""
        return flag


class AllReduceStrategy(_InProcess):
    """Each rank runs its own shards; a collective carries out the reducer.

    Args:
        partitioner: splits a batch among the ranks.
        reducer: a weighted sum, such as the mean.
        engine: "sum" adds everything up in one all-reduce in float64, so that the numbers are
            the same in every world; "ddp" lets torch's DistributedDataParallel exchange the
            gradient in pieces, in the parameters' own type, while the last shard's backward pass
            is still under way.
    """

    name = "allreduce"

    def __init__(
        self,
        partitioner: Partitioner,
        reducer: LinearReducer,
        engine: Literal["sum", "ddp"] = "sum",
    ) -> None:
        super().__init__(partitioner, reducer)
        self.engine = engine
        self._ddp: DataParallel | None = None

    def open(self) -> None:
        """Open the process group."""
        init_process_group()

    def close(self, graceful: bool = True) -> None:
        """Leave the process group, after the slowest rank when graceful."""
        self._ddp = None
        if graceful:
            all_reduce(0.0)
        destroy_process_group()

    def runs_loop(self) -> bool:
        """Yes, on every rank alike."""
        return True

    def backward(self, mapper: Mapper, learner: nn.Module, batch: Any) -> Any:
        """See `Strategy`. Every rank gets the same result and the same gradient."""
        if self.engine == "ddp":
            calls, weights = self._my_calls(learner, batch)
            if self._ddp is None or self._ddp.module is not learner:
                self._ddp = DataParallel(learner)
            part, types = self._ddp.backward(mapper, calls, weights)
            return narrow(all_reduce(part), types)
        answer, part = self._backward(mapper, learner, batch)
        filled = [
            torch.zeros_like(parameter, dtype=torch.float64) if gradient is None else gradient
            for parameter, gradient in zip(_trained(learner), part, strict=True)
        ]
        found = [float(gradient is not None) for gradient in part]
        value, gradient, found = all_reduce((answer.value, filled, found))
        _set_gradient(
            learner, [g if ranks else None for g, ranks in zip(gradient, found, strict=True)]
        )
        return narrow(value, answer.dtypes)

    def collect(self, mapper: Mapper, learner: nn.Module, batch: Any) -> dict[str, Tensor]:
        """See `Strategy`. Every rank gets all figures."""
        joined, ranges, items = self._collect(mapper, learner, batch)
        whole = {name: values.new_zeros(items) for name, values in joined.items()}
        for name, values in joined.items():
            pieces = values.split([stop - first for first, stop in ranges])
            for (first, stop), piece in zip(ranges, pieces, strict=True):
                whole[name][first:stop] = piece
        return all_reduce(whole)

    def agree(self, flag: bool) -> bool:
        """See `Strategy`."""
        return all_reduce(float(flag)) > 0


class RpcStrategy:
    """Rank zero partitions and calls; every worker, rank zero among them, computes.

    Args:
        partitioner: splits a batch among the workers.
        reducer: combines the shards' results.
        gradient: "visit": a worker returns its part of the loss together with its derivative,
            and holds the graph of one shard at a time. "context": the graph spans the workers,
            and a second journey of distributed autograd brings the derivative home.
        call_timeout: seconds until a call fails.
    """

    name = "rpc"
    home: Literal["cpu", "device"] = "cpu"

    def __init__(
        self,
        partitioner: Partitioner,
        reducer: Callable[[list], Any],
        gradient: Literal["visit", "context"] = "visit",
        call_timeout: float = 300.0,
    ) -> None:
        self.partitioner = partitioner
        self.reducer = reducer
        self.gradient = gradient
        self.call_timeout = call_timeout

    def open(self) -> None:
        """Open the RPC world."""
        init_rpc()

    def close(self, graceful: bool = True) -> None:
        """Leave the RPC world. Gracefully, it serves until every rank has come here."""
        shutdown_rpc(graceful)

    def runs_loop(self) -> bool:
        """Rank zero only."""
        return get_rank() == 0

    def backward(self, mapper: Mapper, learner: nn.Module, batch: Any) -> Any:
        """See `Strategy`."""
        learner.zero_grad(set_to_none=True)
        if self.gradient == "visit":
            result = self._reduced(mapper, learner, batch)
            result.loss.backward()
        else:
            with autograd.context() as context_id:
                result = self._reduced(mapper, module_clone(learner, by="clone"), batch)
                autograd.backward(context_id, result.loss)
        return optree.tree_map(lambda leaf: leaf.detach(), result)

    def _reduced(self, mapper: Mapper, learner: nn.Module, batch: Any) -> Any:
        return remote_sync_call(
            mapper,
            args=(learner, batch),
            partitioner=self.partitioner,
            reducer=self.reducer,
            timeout=self.call_timeout,
            gradient=self.gradient,
        )

    def collect(self, mapper: Mapper, learner: nn.Module, batch: Any) -> dict[str, Tensor]:
        """See `Strategy`."""
        with torch.no_grad():
            figures = remote_sync_call(
                mapper,
                args=(learner, batch),
                partitioner=self.partitioner,
                timeout=self.call_timeout,
            )
        return {name: torch.cat([shard[name] for shard in figures]) for name in figures[0]}

    def agree(self, flag: bool) -> bool:
        """The flag: rank zero decides alone."""
        return flag


def _trained(learner: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in learner.parameters() if parameter.requires_grad]


def _set_gradient(learner: nn.Module, gradient: list[Tensor | None]) -> None:
    """A parameter on which no task's loss depends gets None, as from `loss.backward()`."""
    for parameter, piece in zip(_trained(learner), gradient, strict=True):
        parameter.grad = None if piece is None else piece.to(parameter)
