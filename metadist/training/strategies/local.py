"""Everything in this process."""

from typing import Any

import torch
from torch import Tensor, nn

from metadist.distributed import get_world_size
from metadist.distributed.reducers import finish_sum
from metadist.errors import UserError
from metadist.training.strategies.in_process import InProcess, set_gradient
from metadist.training.strategies.strategy import Mapper


class LocalStrategy(InProcess):
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
        answer, gradient, divisor = self._backward(mapper, learner, batch)
        set_gradient(learner, gradient, divisor)
        return finish_sum(answer.value, divisor, answer.dtypes)

    def collect(self, mapper: Mapper, learner: nn.Module, batch: Any) -> dict[str, Tensor]:
        """See `Strategy`."""
        figures, _ = self._figures(mapper, learner, batch)
        return {name: torch.cat([found[name] for found in figures.values()]) for name in figures[0]}

    def agree(self, flag: bool) -> bool:
        """The flag."""
        return flag
