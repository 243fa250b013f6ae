"""Pictures of what a run learned, drawn without a display.

Each function takes plain numbers, writes one PNG file and returns its path.
"""

from metadist.plots.adaptation import AdaptationPicture, adaptation_panels
from metadist.plots.comparison import ComparedCurves, compared_curves
from metadist.plots.curves import learning_curves
from metadist.plots.episodes import EpisodePicture, test_episodes
from metadist.plots.regression import RegressionPicture, regression_tasks
from metadist.plots.sweep import SweepPoint, sweep_picture

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
