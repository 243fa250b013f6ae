"""What a run tells the world: its record, the console, TensorBoard, wandb and pictures.

The layer knows nothing of ranks: whoever creates trackers does so on rank zero alone. Heavy
libraries are imported when a tracker starts or a picture is drawn, never before.
"""

from metadist.tracking.console import Console
from metadist.tracking.jsonl import JsonLines, json_value, read_metrics
from metadist.tracking.pictures import (
    EpisodePicture,
    RegressionPicture,
    learning_curves,
    regression_tasks,
    test_episodes,
)
from metadist.tracking.tensorboard import TensorBoard
from metadist.tracking.tracker import Record, Run, Tracker, Trackers
from metadist.tracking.weights_and_biases import WeightsAndBiases

__all__ = [
    "Console",
    "EpisodePicture",
    "JsonLines",
    "Record",
    "RegressionPicture",
    "Run",
    "TensorBoard",
    "Tracker",
    "Trackers",
    "WeightsAndBiases",
    "json_value",
    "learning_curves",
    "read_metrics",
    "regression_tasks",
    "test_episodes",
]
