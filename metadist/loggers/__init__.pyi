from .console import ConsoleLogger
from .jsonl import METRICS_FILE, JsonlLogger, json_value, read_metrics
from .logger import BUILTIN_METRICS, Logger, LoggerCollection, Metrics, Run, is_user_metric
from .mlflow import MlflowLogger
from .tensorboard import TensorBoardLogger
from .wandb import WandbLogger

__all__ = [
    "BUILTIN_METRICS",
    "METRICS_FILE",
    "ConsoleLogger",
    "JsonlLogger",
    "Logger",
    "LoggerCollection",
    "Metrics",
    "MlflowLogger",
    "Run",
    "TensorBoardLogger",
    "WandbLogger",
    "is_user_metric",
    "json_value",
    "read_metrics",
]
