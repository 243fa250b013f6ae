from .classification import ClassificationData, plot_test_tasks
from .learning_curves import ComparisonData, plot_comparison, plot_learning_curves
from .points import SettingData
from .regression import RegressionData, plot_regression_tasks
from .run_figures import (
    Figure,
    confusion_matrix,
    learning_curve,
    metric_by_steps,
    regression_task,
    task_histogram,
    time_bar,
    training_curve,
)
from .sweep import plot_sweep
from .sweep_figures import compared_curves, heat_map, parallel_coordinates, settings_with_intervals

__all__ = [
    "ClassificationData",
    "ComparisonData",
    "Figure",
    "RegressionData",
    "SettingData",
    "compared_curves",
    "confusion_matrix",
    "heat_map",
    "learning_curve",
    "metric_by_steps",
    "parallel_coordinates",
    "plot_comparison",
    "plot_learning_curves",
    "plot_regression_tasks",
    "plot_sweep",
    "plot_test_tasks",
    "regression_task",
    "settings_with_intervals",
    "task_histogram",
    "time_bar",
    "training_curve",
]
