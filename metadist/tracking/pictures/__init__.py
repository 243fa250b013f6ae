"""Pictures of what a run learned, drawn without a display.

Each function takes plain numbers, writes one PNG file and returns its path.
"""

from metadist.tracking.pictures.adaptation import AdaptationPicture, adaptation_panels
from metadist.tracking.pictures.comparison import ComparedCurves, compared_curves
from metadist.tracking.pictures.curves import learning_curves
from metadist.tracking.pictures.episodes import EpisodePicture, test_episodes
from metadist.tracking.pictures.regression import RegressionPicture, regression_tasks
from metadist.tracking.pictures.sweep import SweepPoint, sweep_picture

__all__ = [
    "AdaptationPicture",
    "ComparedCurves",
    "EpisodePicture",
    "RegressionPicture",
    "SweepPoint",
    "adaptation_panels",
    "compared_curves",
    "learning_curves",
    "regression_tasks",
    "sweep_picture",
    "test_episodes",
]
