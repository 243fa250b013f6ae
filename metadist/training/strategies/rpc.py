"""`strategy=rpc`: rank zero calls the other ranks, which compute their shards."""

from collections.abc import Callable
from typing import Annotated, Any, Literal

import optree
import torch
from annotated_types import Gt, Le
from torch import Tensor, nn

from metadist import distributed
from metadist.distributed.partitioners import Partitioner
from metadist.distributed.reducers import LinearReducer
from metadist.distributed.requests import FANOUT
from metadist.distributed.store import RENDEZVOUS_TIMEOUT
from metadist.distributed.transport import MAX_TIMEOUT
from metadist.errors import UserError
from metadist.profile_ranges import profile_range
from metadist.training.strategies.strategy import (
    Mapper,
    StopRequested,
    Strategy,
    concatenate_shards,
    never,
)

_PING_SHARE = 0.8
"""Timeout of a ping as a fraction of `timeout_seconds`, so that lost workers are found in time."""


class RpcStrategy(Strategy):
    """Rank zero partitions the batch and sends shards to the workers, of which it is one itself.

    Args:
        partitioner: splits a batch among the workers.
        reducer: combines the shards' results.
        gradient: "worker": each worker returns its part of the loss and of the gradient in one
            RPC and holds the graph of one chunk at a time. "dist_autograd": the graph spans the
            workers, and distributed autograd computes the gradient in a second pass.
        timeout_seconds: seconds within which a worker that died, froze or cannot be reached is
            detected.
        fanout: the number of other workers to which rank zero, and each worker in turn, sends
            requests.
        rendezvous_timeout_seconds: seconds by which the ranks' starts may differ.
        call_timeout: seconds that a call may take on workers that are alive.
    """

    name = "rpc"
    parameter_device = "cpu"
    every_rank_drives = False

    def __init__(
        self,
        partitioner: Partitioner,
        reducer: Callable[[list], Any],
        gradient: Literal["worker", "dist_autograd"] = "worker",
        timeout_seconds: Annotated[float, Gt(0)] = 30.0,
        fanout: Annotated[int, Gt(0)] = FANOUT,
        rendezvous_timeout_seconds: Annotated[float, Gt(0)] = RENDEZVOUS_TIMEOUT,
        call_timeout: Annotated[float, Gt(0), Le(MAX_TIMEOUT)] = 3600.0,
    ) -> None:
        super().__init__(partitioner, reducer)
        self.gradient = gradient
        self.timeout_seconds = timeout_seconds
        self.fanout = fanout
        self.rendezvous_timeout_seconds = rendezvous_timeout_seconds
        self.call_timeout = call_timeout

    def open(self) -> None:
        """Initialize RPC."""
        distributed.init_rpc(
            rendezvous_timeout=self.rendezvous_timeout_seconds,
            ping_timeout=_PING_SHARE * self.timeout_seconds,
        )

    def close(self, graceful: bool = True) -> None:
        """Shut RPC down. If graceful, this rank serves requests until every rank has called it."""
        distributed.shutdown_rpc(graceful)

    @property
    def sums_on_workers(self) -> bool:
        """True with gradient="worker" and a linear reducer only."""
        return self.gradient == "worker" and super().sums_on_workers

    def forward_backward(
        self, mapper: Mapper, learner: nn.Module, batch: Any, stop_requested: StopRequested = never
    ) -> tuple[Any, bool]:
        """See `Strategy`."""
        learner.zero_grad(set_to_none=True)
        if self.gradient == "worker":
            result = self._call(mapper, learner, batch)
            with profile_range("reduce"):  # puts the gradient of the workers into `.grad`
                if result.loss.requires_grad:
                    result.loss.backward()
        else:
            with distributed.autograd.context() as context_id:
                result = self._call(mapper, distributed.module_clone(learner, by="clone"), batch)
                with profile_range("backward"):
                    if result.loss.requires_grad:
                        distributed.autograd.backward(context_id, result.loss)
        detached: Any = optree.tree_map(
            lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, result
        )
        return detached, stop_requested()

    def _call(self, mapper: Mapper, learner: nn.Module, batch: Any) -> Any:
        """The reduced result.

        Raises:
            UserError: a reducer of the user's returned no scalar loss with a gradient.
        """
        result = distributed.remote_sync_call(
            mapper,
            args=(learner, batch),
            partitioner=self.partitioner,
            reducer=self.reducer,
            timeout=self.call_timeout,
            gradient=self.gradient,
            fanout=self.fanout,
        )
        if isinstance(self.reducer, LinearReducer):
            return result
        loss, name = getattr(result, "loss", None), type(self.reducer).__name__
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise UserError(
                f"the reducer {name} returned {result!r:.80}: return a result like those that it "
                "gets, such as results[0]._replace(loss=…), with a scalar loss."
            )
        if not loss.requires_grad and any(p.requires_grad for p in learner.parameters()):
            raise UserError(
                f"the loss that the reducer {name} returned has no gradient: compute it from the "
                "losses of the results, without detach() or torch.no_grad()."
            )
        return result

    def map_tasks(self, mapper: Mapper, learner: nn.Module, batch: Any) -> dict[str, Tensor]:
        """See `Strategy`."""
        with torch.no_grad():
            values = distributed.remote_sync_call(
                mapper,
                args=(learner, batch),
                partitioner=self.partitioner,
                timeout=self.call_timeout,
                fanout=self.fanout,
            )
        return concatenate_shards(learner, values)
