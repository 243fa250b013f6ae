"""Training: the loop, its strategies, evaluation, checkpoints."""

from metadist.training.adaptation import draw_adaptation
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
from metadist.training.protocol import differences_in_words, protocol_differences
from metadist.training.replay import Replay, parse_key, replay
from metadist.training.resume import restore
from metadist.training.strategies import (
    AllReduceStrategy,
    LocalStrategy,
    RpcStrategy,
    Strategy,
)
from metadist.training.sweep_report import SweepReport, report_on

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
    "SweepReport",
    "TaskMapper",
    "TrainTasks",
    "Trainer",
    "differences_in_words",
    "draw_adaptation",
    "parse_key",
    "protocol_differences",
    "replay",
    "report_on",
    "resolve_device",
    "restore",
    "run",
]
