"""Training: the trainer, its strategies, evaluation, checkpoints."""

from metadist.training.experiment import Experiment, TrainerConfig, TrainState
from metadist.training.replay import Replay, parse_key, replay
from metadist.training.resume import restore
from metadist.training.run_plots import plot_adaptation
from metadist.training.signals import Interrupted
from metadist.training.strategies import (
    AllReduceStrategy,
    LocalStrategy,
    RpcStrategy,
    Strategy,
)
from metadist.training.task_mapper import (
    EvaluateMapper,
    MetaBatch,
    TaskMapper,
    TrainMapper,
    resolve_device,
)
from metadist.training.trainer import Trainer

__all__ = [
    "AllReduceStrategy",
    "EvaluateMapper",
    "Experiment",
    "Interrupted",
    "LocalStrategy",
    "MetaBatch",
    "Replay",
    "RpcStrategy",
    "Strategy",
    "TaskMapper",
    "TrainMapper",
    "TrainState",
    "Trainer",
    "TrainerConfig",
    "parse_key",
    "plot_adaptation",
    "replay",
    "resolve_device",
    "restore",
]
