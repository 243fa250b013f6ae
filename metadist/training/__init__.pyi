from .callbacks import Callback, EarlyStopping, WeightAveraging
from .compilation import compile_step
from .device import resolve_device
from .experiment import Experiment, TrainerConfig, TrainState
from .export import export_weights
from .initialization import initialize
from .precision import Precision, supported_precision
from .prediction import predict_unlabeled
from .resume import restore
from .signals import Interrupted
from .strategies.allreduce import AllReduceStrategy
from .strategies.local import LocalStrategy
from .strategies.rpc import RpcStrategy
from .strategies.strategy import Strategy
from .task_mapper import (
    EvaluateMapper,
    MetaBatch,
    TaskMapper,
    TrainMapper,
)
from .trainer import StepOutput, Trainer

__all__ = [
    "AllReduceStrategy",
    "Callback",
    "EarlyStopping",
    "EvaluateMapper",
    "Experiment",
    "Interrupted",
    "LocalStrategy",
    "MetaBatch",
    "Precision",
    "RpcStrategy",
    "StepOutput",
    "Strategy",
    "TaskMapper",
    "TrainMapper",
    "TrainState",
    "Trainer",
    "TrainerConfig",
    "WeightAveraging",
    "compile_step",
    "export_weights",
    "initialize",
    "predict_unlabeled",
    "resolve_device",
    "restore",
    "supported_precision",
]
