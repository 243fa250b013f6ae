from .adaptation import AdaptationData, plot_adaptation
from .classification import ClassificationData, plot_test_tasks
from .learning_curves import ComparisonData, plot_comparison, plot_learning_curves
from .regression import RegressionData, plot_regression_tasks
from .sweep import SweepData, plot_sweep

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
