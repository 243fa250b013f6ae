"""Parts of an experiment, as a user may write them, that fail on purpose.

They are named by `_target_` on the command line; METADIST_FAULT_TIME is the file in which they note
when they failed.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from metadist.algorithms import MAML
from metadist.algorithms.learner import TaskResult
from metadist.distributed import get_rank
from metadist.distributed.reducers import MeanReducer
from metadist.loggers import Logger, Metrics
from metadist.tasks import Episode

_CALLS = 40


class FaultInjected(Exception):
    """The mistake of whoever wrote the part."""


def fail() -> None:
    """Note the time and raise."""
    _note()
    raise FaultInjected("a mistake on purpose")


def _note() -> None:
    Path(os.environ["METADIST_FAULT_TIME"]).write_text(repr(time.time()))


class FaultyMAML(MAML):
    """MAML that fails at its start, or in one of its tasks.

    Args:
        where: "start", "task" or "exit" (ends the process in a task).
        rank: on which rank.
    """

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
        """A task, like any other but for the one that fails."""
        _count["tasks"] += 1
        if get_rank() == self.rank and _count["tasks"] > _CALLS and self.where != "start":
            if self.where == "exit":
                _note()
                os._exit(3)
            fail()
        return super().forward(episode)


_count = {"tasks": 0, "reductions": 0}


@dataclass(frozen=True)
class FaultyReducer(MeanReducer):
    """A mean that fails after a while."""

    def weights(self, sizes: list[float]) -> list[float]:
        """As of the mean."""
        _count["reductions"] += 1
        if _count["reductions"] > _CALLS:
            fail()
        return super().weights(sizes)


class FaultyLogger(Logger):
    """A logger that fails at the tenth iteration."""

    def log_metrics(self, metrics: Metrics) -> None:
        """Raises at the tenth iteration."""
        if metrics["iteration"] == 10:
            fail()
