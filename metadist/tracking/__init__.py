"""What a run tells the world: its record, the console, TensorBoard, wandb and pictures.

The layer knows nothing of ranks: whoever creates trackers does so on rank zero alone. Heavy
libraries are imported when a tracker starts or a picture is drawn, never before.
"""

from metadist.tracking.console import Console
from metadist.tracking.jsonl import JsonLines, json_value, read_metrics
from metadist.tracking.pictures import (
    AdaptationPicture,
    ComparedCurves,
    EpisodePicture,
    RegressionPicture,
    SweepPoint,
    adaptation_panels,
    compared_curves,
    learning_curves,
    regression_tasks,
    sweep_picture,
    test_episodes,
)
from metadist.tracking.student import mean_and_interval
from metadist.tracking.tensorboard import TensorBoard
from metadist.tracking.tracker import Record, Run, Tracker, Trackers
from metadist.tracking.weights_and_biases import WeightsAndBiases

__all__ = [
    "AdaptationPicture",
    "ComparedCurves",
    "Console",
    "EpisodePicture",
    "JsonLines",
    "Record",
    "RegressionPicture",
    "Run",
    "SweepPoint",
    "TensorBoard",
    "Tracker",
    "Trackers",
    "WeightsAndBiases",
    "adaptation_panels",
    "compared_curves",
    "json_value",
    "learning_curves",
    "mean_and_interval",
    "read_metrics",
    "regression_tasks",
    "sweep_picture",
    "test_episodes",
]
