"""The interface of strategies.

A strategy splits a batch with the partitioner, runs a mapper `(learner, batch) -> result` on each
shard, and combines the results with the reducer. By default, all strategies give the same bits on
CPUs; see `metadist.distributed.reducers`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from metadist.algorithms.learner import require_equal_metrics
from metadist.distributed import get_rank
from metadist.distributed.partitioners import Partitioner
from metadist.distributed.reducers import LinearReducer

Mapper = Callable[[Any, Any], Any]
"""(learner, batch) -> result."""

StopRequested = Callable[[], bool]
"""Whether this driver was asked to stop."""


def never() -> bool:
    """The default `StopRequested`."""
    return False


class Strategy(ABC):
    """Computes meta-batches. Every rank makes one.

    Args:
        partitioner: splits a batch among the workers.
        reducer: combines the shards' results.

    Attributes:
        name: "local", "rpc" or "allreduce"; of a class without one, the name of the class.
        parameter_device: the device of the learner's parameters: "cpu", or "device" for each
            rank's own device.
        every_rank_drives: whether every rank runs the training loop, instead of rank zero alone.
    """

    name: str
    parameter_device: Literal["cpu", "device"] = "device"
    every_rank_drives = True

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if not hasattr(cls, "name"):
            cls.name = cls.__name__

    def __init__(self, partitioner: Partitioner, reducer: Callable[[list], Any]) -> None:
        self.partitioner = partitioner
        self.reducer = reducer

    @abstractmethod
    def open(self) -> None:
        """Join the other ranks. Every rank calls it."""

    @abstractmethod
    def close(self, graceful: bool = True) -> None:
        """Leave. If graceful, every rank calls it, and it returns when all ranks have."""

    @property
    def is_driver(self) -> bool:
        """Whether this rank runs the training loop; other ranks serve requests until `close`."""
        return self.every_rank_drives or get_rank() == 0

    @property
    def sums_on_workers(self) -> bool:
        """Whether each worker sums over its own tasks, which it can batch and compile.

        Otherwise it runs the mapper on one shard after the other, one task at a time.
        """
        return isinstance(self.reducer, LinearReducer)

    @abstractmethod
    def forward_backward(
        self, mapper: Mapper, learner: nn.Module, batch: Any, stop_requested: StopRequested = never
    ) -> tuple[Any, bool]:
        """Compute the reduced result, and put the gradient of its `loss` into `.grad`.

        The drivers call it. `.grad` is replaced, not accumulated. It has the strides of its
        parameter, which fused optimizers require on CPUs. For a parameter on which no task's loss
        depends, it is None, or zero with distributed autograd and the engine "ddp".

        Args:
            mapper: the function that the workers run.
            learner: the mapper's first argument.
            batch: the mapper's second argument, which is split.
            stop_requested: a function that is called once, after the computation.

        Returns:
            The reduced result, detached, and whether `stop_requested` returned True on any driver.
            Both are the same on all drivers.
        """

    @abstractmethod
    def map_tasks(self, mapper: Mapper, learner: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Compute the mapper's values for all items of the batch, without gradients.

        The drivers call it, and all get the same values.

        Args:
            mapper: the function that the workers run. It returns tensors by name, with a first
                dimension of items.
            learner: the mapper's first argument.
            batch: the mapper's second argument, which is split.

        Returns:
            The tensors of all shards, by name, concatenated in order.
        """

    def any_rank(self, flag: bool) -> bool:
        """Whether the flag is set on any driver. The drivers call it."""
        return flag

    def barrier(self) -> None:  # noqa: B027  # one driver waits for nobody
        """Wait for the other drivers. The drivers call it."""

    def broadcast_module(self, module: nn.Module) -> None:  # noqa: B027  # one driver: no copies
        """Copy rank zero's parameters, with their `requires_grad`, and buffers to the other
        drivers. The drivers call it.
        """

    def check_replicas(self, tensors: Iterable[Tensor], iteration: int) -> None:  # noqa: B027
        """Compare the drivers' copies of some tensors by a digest. The drivers call it.

        Args:
            tensors: the tensors that must be equal, in the same order on every driver.
            iteration: finished outer steps, for the error message.

        Raises:
            UserError: the copies differ. It is raised on all drivers.
        """


def concatenate_shards(
    learner: nn.Module, values: Sequence[dict[str, Tensor]]
) -> dict[str, Tensor]:
    """The values of all shards, by name, concatenated in order."""
    require_equal_metrics(learner, values)
    return {name: torch.cat([shard[name] for shard in values]) for name in values[0]}
