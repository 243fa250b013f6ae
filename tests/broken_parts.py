"""An algorithm with a mistake in it, as a user may write one."""

import os
import time

from torch import nn

from metadist.algorithms import MAML
from metadist.distributed import get_rank

tasks = 0


class BrokenMAML(MAML):
    """MAML that fails on one rank: at its start, in a task, or by leaving in the middle."""

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
            if self.where == "hang and fail elsewhere":
                time.sleep(60)
            raise LookupError("a mistake on purpose")
        if tasks > 8 and self.where == "hang and fail elsewhere":
            raise LookupError("a mistake on purpose")
        return super().forward(episode)
