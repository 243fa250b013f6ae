"""What a run tells the world: its record, the console, TensorBoard, wandb and pictures.

The layer knows nothing of ranks: whoever creates trackers does so on rank zero alone. Heavy
libraries are imported when a tracker starts or a picture is drawn, never before.
"""

from metadist.loggers.console import Console
from metadist.loggers.jsonl import JsonLines, json_value, read_metrics
from metadist.loggers.student import mean_and_interval
from metadist.loggers.tensorboard import TensorBoard
from metadist.loggers.tracker import Record, Run, Tracker, Trackers
from metadist.loggers.weights_and_biases import WeightsAndBiases

__all__ = [
    "Console",
    "JsonLines",
    "Record",
    "Run",
    "TensorBoard",
    "Tracker",
    "Trackers",
    "WeightsAndBiases",
    "json_value",
    "mean_and_interval",
    "read_metrics",
]
