"""Components of an experiment that fail on purpose, selected by `_target_`.

The file named by METADIST_FAULT_TIME receives the time of the failure.
"""

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from metadist.algorithms import MAML
from metadist.algorithms.learner import TaskResult
from metadist.distributed import get_rank, remote_sync_call
from metadist.distributed.collectives import init_process_group
from metadist.distributed.reducers import MeanReducer
from metadist.loggers import Logger, Metrics
from metadist.tasks import Episode
from metadist.training import AllReduceStrategy, RpcStrategy

_CALLS_BEFORE_FAULT = 40


class FaultInjected(Exception):
    """The injected error."""


def fail() -> None:
    """Record the time and raise."""
    _record_time()
    raise FaultInjected("injected fault")


def _record_time() -> None:
    Path(os.environ["METADIST_FAULT_TIME"]).write_text(repr(time.time()))


class FaultyMAML(MAML):
    """MAML that fails in its constructor or in a task.

    Args:
        where: "start" (the constructor), "task", "sys.exit" or "os._exit" (in a task).
        rank: the rank that fails.
    """

    batches_tasks = True

    def __init__(
        self,
        model: nn.Module,
        regression: bool = False,
        inner_lr: float = 0.4,
        where: str = "task",
        rank: int = 1,
    ) -> None:
        super().__init__(model, regression, inner_lr)
        self.where, self.rank = where, rank
        if where == "start" and get_rank() == rank:
            fail()

    def forward(self, episode: Episode) -> TaskResult:
        """See `MAML.forward`."""
        _count["tasks"] += 1
        if (
            get_rank() == self.rank
            and _count["tasks"] > _CALLS_BEFORE_FAULT
            and self.where != "start"
        ):
            if self.where == "os._exit":
                _record_time()
                os._exit(3)
            if self.where == "sys.exit":
                _record_time()
                sys.exit(3)
            fail()
        return super().forward(episode)


_count = {"tasks": 0, "reductions": 0}


@dataclass(frozen=True)
class FaultyReducer(MeanReducer):
    """`MeanReducer` that fails after some calls."""

    def weights(self, sizes: list[float]) -> list[float]:
        """See `MeanReducer.weights`."""
        _count["reductions"] += 1
        if _count["reductions"] > _CALLS_BEFORE_FAULT:
            fail()
        return super().weights(sizes)


class FaultyLogger(Logger):
    """A logger that fails at the tenth iteration."""

    def log_metrics(self, metrics: Metrics) -> None:
        """Fail at iteration 10."""
        if metrics["iteration"] == 10:
            fail()


class _Unpicklable:
    def __reduce__(self) -> tuple:
        raise FaultInjected("injected fault")


class UnpicklableResultLogger(Logger):
    """Calls, at the tenth iteration, a function on rank 1 whose result cannot be pickled."""

    def log_metrics(self, metrics: Metrics) -> None:
        """Call it at iteration 10."""
        if metrics["iteration"] == 10:
            _record_time()
            remote_sync_call(_Unpicklable, partitioner=1)


class _SlowToClose:
    """Leaving after an error takes ten seconds."""

    def close(self, graceful: bool = True) -> None:
        if not graceful:
            time.sleep(10)
        super().close(graceful)  # type: ignore[misc]


class SlowToCloseRpc(_SlowToClose, RpcStrategy):
    """`RpcStrategy` that takes ten seconds to leave after an error."""


class SlowToCloseAllReduce(_SlowToClose, AllReduceStrategy):
    """`AllReduceStrategy` that takes ten seconds to leave after an error."""


class GpuGroupAllReduce(AllReduceStrategy):
    """A process group with a backend for GPUs alone; the first collective is on the CPU."""

    def open(self) -> None:
        """Open the group."""
        init_process_group("cuda:gloo")  # type: ignore[arg-type]  # needs no GPU
        _record_time()


class _EndsLate:
    """Every rank but zero ends three seconds after the others have left."""

    def close(self, graceful: bool = True) -> None:
        super().close(graceful)  # type: ignore[misc]
        if get_rank() != 0:
            time.sleep(3)


class EndsLateRpc(_EndsLate, RpcStrategy):
    """`RpcStrategy` with which rank zero ends first."""


class EndsLateAllReduce(_EndsLate, AllReduceStrategy):
    """`AllReduceStrategy` with which rank zero ends first."""
