"""Pictures of what a run learned, drawn without a display.

Each function takes plain numbers, writes one PNG file and returns its path.
"""

from metadist.tracking.pictures.curves import learning_curves
from metadist.tracking.pictures.episodes import EpisodePicture, test_episodes
from metadist.tracking.pictures.regression import RegressionPicture, regression_tasks

__all__ = [
    "EpisodePicture",
    "RegressionPicture",
    "learning_curves",
    "regression_tasks",
    "test_episodes",
]
