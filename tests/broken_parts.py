"""Components with a mistake in them, as a user may write them."""

import os
import signal
import sys
import threading
import time

from torch import nn

from metadist.algorithms import MAML
from metadist.distributed import get_rank
from metadist.distributed.collectives import init_process_group
from metadist.distributed.job import current_job
from metadist.loggers import Logger
from metadist.models import Conv4
from metadist.training import AllReduceStrategy, Callback, RpcStrategy

tasks = 0


class BrokenMAML(MAML):
    """MAML that fails on one rank: at its start, in a task, by leaving in the middle or hanging."""

    batches_tasks = True

    def __init__(
        self, model: nn.Module, regression: bool = False, where: str = "task", rank: int = 1
    ) -> None:
        super().__init__(model, regression)
        self.where, self.rank = where, rank
        if where == "start" and get_rank() == rank:
            raise LookupError("a mistake on purpose")

    def forward(self, episode):
        global tasks
        tasks += 1
        if tasks > 8 and get_rank() == self.rank:
            if self.where == "exit":
                os._exit(3)
            if self.where == "sys.exit":
                sys.exit(0)
            if self.where in ("hang", "hang and fail elsewhere"):
                time.sleep(3600)  # longer than a test waits
            raise LookupError("a mistake on purpose")
        if tasks > 8 and self.where == "hang and fail elsewhere":
            raise LookupError("a mistake on purpose")
        return super().forward(episode)


class UnusedParameter(Conv4):
    """A model with a parameter on which no loss depends."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.unused = nn.Linear(2, 2)


class NotCompiledOnRankOne(MAML):
    """MAML whose training step depends on values, which is not compiled, on rank one."""

    batches_tasks = True

    def train_task(self, episode):
        result = super().train_task(episode)
        if get_rank() == 1 and not result.loss.sum() > 0:
            raise ValueError("the loss is not positive")
        return result


class InterruptsTorchrun(Callback):
    """Sends torchrun a SIGINT after three iterations, and waits until the ranks have received it.

    torchrun is the parent of the ranks.
    """

    def on_iteration_end(self, trainer, output):
        if trainer.state.iteration == 3:
            os.kill(os.getppid(), signal.SIGINT)
            while not current_job().stop_signal:
                time.sleep(0.01)


class SlowToCloseRpc(RpcStrategy):
    """RPC that takes a minute to shut down after an error."""

    def close(self, graceful: bool = True) -> None:
        if not graceful:
            threading.Event().wait(60)
        super().close(graceful)


class SlowToCloseAllReduce(AllReduceStrategy):
    """A process group that takes a minute to abort after an error."""

    def close(self, graceful: bool = True) -> None:
        if not graceful:
            threading.Event().wait(60)
        super().close(graceful)


class SlowToCloseLogger(Logger):
    """A logger that takes a minute to close."""

    def close(self) -> None:
        threading.Event().wait(60)


class GroupForGpus(AllReduceStrategy):
    """A process group with a backend for GPUs alone, and parameters on the CPU."""

    def open(self) -> None:
        init_process_group("cuda:gloo")
