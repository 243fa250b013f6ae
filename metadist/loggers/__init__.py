"""Loggers of a run: console, `metrics.jsonl`, TensorBoard and Weights & Biases.

Rank zero alone creates them. Heavy libraries are imported when a logger starts.
"""

from metadist.loggers.console import ConsoleLogger
from metadist.loggers.jsonl import METRICS_FILE, JsonlLogger, json_value, read_metrics
from metadist.loggers.logger import Logger, LoggerCollection, Metrics, Run
from metadist.loggers.tensorboard import TensorBoardLogger
from metadist.loggers.wandb import WandbLogger

__all__ = [
    "METRICS_FILE",
    "ConsoleLogger",
    "JsonlLogger",
    "Logger",
    "LoggerCollection",
    "Metrics",
    "Run",
    "TensorBoardLogger",
    "WandbLogger",
    "json_value",
    "read_metrics",
]
