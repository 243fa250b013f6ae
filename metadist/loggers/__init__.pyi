from .console import ConsoleLogger
from .jsonl import METRICS_FILE, JsonlLogger, json_value, read_metrics
from .logger import Logger, LoggerCollection, Metrics, Run, flatten_values
from .mlflow import MlflowLogger
from .tensorboard import TensorBoardLogger
from .wandb import WandbLogger

__all__ = [
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
    "flatten_values",
    "json_value",
    "read_metrics",
]
