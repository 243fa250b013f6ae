"""Rank zero partitions and calls; every worker computes."""

from collections.abc import Callable
from typing import Annotated, Any, Literal

import optree
import torch
from annotated_types import Gt
from torch import Tensor, nn

from metadist.distributed import get_rank, module_clone, remote_sync_call, shutdown_rpc
from metadist.distributed.partitioners import Partitioner
from metadist.distributed.phases import phase
from metadist.training.strategies.strategy import Mapper

_ANSWER_SHARE = 0.8
"""Of the timeout: how long a heartbeat may stay unanswered, so that the end comes in time."""


class RpcStrategy:
    """Rank zero partitions and calls; every worker, rank zero among them, computes.

    Args:
        partitioner: splits a batch among the workers.
        reducer: combines the shards' results.
        gradient: "worker": each worker returns its part of the loss and of the gradient in one
            RPC and holds the graph of one shard at a time. "dist_autograd": the graph spans the
            workers, and distributed autograd computes the gradient in a second pass.
        timeout_seconds: seconds that ranks may arrive apart, and within which a worker that died,
            froze or cannot be reached is found.
        call_timeout: seconds that a call may take on workers that are alive.
    """

    name = "rpc"
    home: Literal["cpu", "device"] = "cpu"

    def __init__(
        self,
        partitioner: Partitioner,
        reducer: Callable[[list], Any],
        gradient: Literal["worker", "dist_autograd"] = "worker",
        timeout_seconds: Annotated[float, Gt(0)] = 30.0,
        call_timeout: Annotated[float, Gt(0)] = 3600.0,
    ) -> None:
        self.partitioner = partitioner
        self.reducer = reducer
        self.gradient = gradient
        self.timeout_seconds = timeout_seconds
        self.call_timeout = call_timeout

    def open(self) -> None:
        """Initialize RPC."""
        from metadist.distributed import init_rpc  # it imports torch.distributed.rpc

        init_rpc(
            rendezvous_timeout=self.timeout_seconds,
            ping_timeout=_ANSWER_SHARE * self.timeout_seconds,
        )

    def close(self, graceful: bool = True) -> None:
        """Leave the RPC world. Gracefully, it serves until every rank has come here."""
        shutdown_rpc(graceful)

    def runs_loop(self) -> bool:
        """Rank zero only."""
        return get_rank() == 0

    def backward(self, mapper: Mapper, learner: nn.Module, batch: Any) -> Any:
        """See `Strategy`."""
        learner.zero_grad(set_to_none=True)
        if self.gradient == "worker":
            result = self._reduced(mapper, learner, batch)
            with phase("reduce"):  # the derivative has come with the value
                result.loss.backward()
        else:
            from metadist.distributed import autograd

            with autograd.context() as context_id:
                result = self._reduced(mapper, module_clone(learner, by="clone"), batch)
                with phase("backward"):
                    autograd.backward(context_id, result.loss)
        return optree.tree_map(
            lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, result
        )

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
