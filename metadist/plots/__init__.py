"""Plots of training and test, drawn without a display.

Each function takes plain numbers and arrays, writes one PNG file and returns its path.
"""

from metadist.plots.adaptation import AdaptationData, plot_adaptation
from metadist.plots.classification import ClassificationData, plot_test_tasks
from metadist.plots.learning_curves import ComparisonData, plot_comparison, plot_learning_curves
from metadist.plots.regression import RegressionData, plot_regression_tasks
from metadist.plots.sweep import SweepData, plot_sweep

__all__ = [
    "AdaptationData",
    "ClassificationData",
    "ComparisonData",
    "RegressionData",
    "SweepData",
    "plot_adaptation",
    "plot_comparison",
    "plot_learning_curves",
    "plot_regression_tasks",
    "plot_sweep",
    "plot_test_tasks",
]
