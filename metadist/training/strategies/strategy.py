"""What every strategy can do: the interface through which the loop has a meta-batch carried out.

A strategy takes a mapper `(learner, batch) -> result`, splits the batch with the partitioner and
combines the results with the reducer; what differs is where the mapper runs.
"""

from collections.abc import Callable
from typing import Any, Literal, Protocol

from torch import Tensor, nn

from metadist.distributed.partitioners import Partitioner

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
