"""Training: the loop, its strategies, evaluation, checkpoints."""

from metadist.training.experiment import Experiment, Trainer
from metadist.training.interrupts import Interrupted
from metadist.training.loop import run
from metadist.training.mappers import (
    EvaluateTasks,
    MetaBatch,
    TaskMapper,
    TrainTasks,
    resolve_device,
)
from metadist.training.replay import Replay, parse_key, replay
from metadist.training.resume import restore
from metadist.training.run_plots import plot_adaptation
from metadist.training.strategies import (
    AllReduceStrategy,
    LocalStrategy,
    RpcStrategy,
    Strategy,
)

__all__ = [
    "AllReduceStrategy",
    "EvaluateTasks",
    "Experiment",
    "Interrupted",
    "LocalStrategy",
    "MetaBatch",
    "Replay",
    "RpcStrategy",
    "Strategy",
    "TaskMapper",
    "TrainTasks",
    "Trainer",
    "parse_key",
    "plot_adaptation",
    "replay",
    "resolve_device",
    "restore",
    "run",
]
