"""Training: the trainer, its strategies, evaluation, checkpoints."""

from metadist.training.callbacks import Callback, EarlyStopping, WeightAveraging
from metadist.training.experiment import (
    Experiment,
    TaskShape,
    TrainerConfig,
    TrainState,
    compile_options,
)
from metadist.training.export import export_weights
from metadist.training.initialization import initialize
from metadist.training.prediction import predict_unlabeled
from metadist.training.resume import restore
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
    "Callback",
    "EarlyStopping",
    "EvaluateMapper",
    "Experiment",
    "Interrupted",
    "LocalStrategy",
    "MetaBatch",
    "RpcStrategy",
    "Strategy",
    "TaskMapper",
    "TaskShape",
    "TrainMapper",
    "TrainState",
    "Trainer",
    "TrainerConfig",
    "WeightAveraging",
    "compile_options",
    "export_weights",
    "initialize",
    "predict_unlabeled",
    "resolve_device",
    "restore",
]
