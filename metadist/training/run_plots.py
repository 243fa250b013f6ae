"""Plots of runs: learning curves and test tasks."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from metadist import plots
from metadist.algorithms import Learner
from metadist.files import REDIRECT_REPLAY, wrap_write_errors
from metadist.loggers import METRICS_FILE, read_metrics
from metadist.reports import LEARNING_CURVES_FILE, TEST_TASKS_FILE, VALIDATION_TASKS_FILE
from metadist.tasks import (
    Episode,
    Examples,
    TaskDistribution,
)
from metadist.training.experiment import Experiment, evaluation_keys
from metadist.training.task_mapper import MetaBatch

_TEST_TASKS = 4


def plot_run(experiment: Experiment, results: Mapping[str, Any]) -> list[Path]:
    """Plot the learning curves and the first test tasks of a run. Rank zero calls it.

    Args:
        experiment: the finished run, with `metrics.jsonl` in its directory.
        results: the content of `results.json`.

    Returns:
        The files written: the learning curves, and the test tasks if they can be plotted, see
        `plot_task`.
    """
    curves = plots.plot_learning_curves(
        read_metrics(experiment.directory / METRICS_FILE),
        experiment.directory / LEARNING_CURVES_FILE,
        experiment.title,
        (results[f"test_{experiment.metric}"], results["ci95"]),
        experiment.split_descriptions,
        experiment.configuration["algorithm"],
    )
    count = min(_TEST_TASKS, experiment.trainer_config.eval_tasks)
    keys = evaluation_keys(experiment, "test", range(count))
    path = experiment.directory / TEST_TASKS_FILE
    plotted = _plot_tasks(experiment, experiment.evaluated_learner, keys, path, experiment.title)
    return [curves] if plotted is None else [curves, plotted]


def plot_validation_tasks(experiment: Experiment) -> list[Path]:
    """Plot the first validation tasks with the predictions of the current state.

    Rank zero calls it during training: neither buffers nor random states change.

    Returns:
        The file written, `validation_tasks.png`; [] if the tasks cannot be plotted.
    """
    count = min(_TEST_TASKS, experiment.trainer_config.validation_tasks)
    keys = evaluation_keys(experiment, "validation", range(count))
    title = f"{experiment.title}: validation at iteration {experiment.state.iteration}"
    path = experiment.directory / VALIDATION_TASKS_FILE
    plotted = _plot_tasks(experiment, experiment.evaluated_learner, keys, path, title)
    return [] if plotted is None else [plotted]


def plot_task(path: Path, experiment: Experiment, key: Tensor) -> Path | None:
    """Plot one task and the predictions of the experiment's learner after adaptation.

    Args:
        path: the PNG file to write; its folder is created.
        experiment: the experiment, whose learner is set to evaluation mode.
        key: the task's key, shape (4,).

    Returns:
        `path`, or None if the task cannot be plotted: it has no support set, its inputs are not
        images in grey or color, it is a function of several numbers, or the learner does not return
        a prediction per query.
    """
    title = f"task {','.join(map(str, key.tolist()))}"
    return _plot_tasks(experiment, experiment.learner, [key], path, title)


def can_plot(tasks: TaskDistribution) -> bool:
    """Whether tasks are images in grey or color, or scalar functions of a scalar."""
    if tasks.regression:
        return tasks.input_shape == (1,) and tasks.outputs == 1
    return len(tasks.input_shape) == 3 and tasks.input_shape[0] in (1, 3)


def _plot_tasks(
    experiment: Experiment, learner: Learner, keys: Iterable[Tensor], path: Path, title: str
) -> Path | None:
    """Plot tasks, and the predictions of a learner after adaptation; see `plot_task`."""
    if not can_plot(experiment.tasks):
        return None
    pairs = []
    for key in keys:
        episode = experiment.tasks.sample(key)
        if not len(episode.support.targets):
            return None
        values = predict_task(experiment, learner, key, episode)
        if values is None or values.dim() != 2 or len(values) != len(episode.query.targets):
            return None  # an algorithm may compute losses and metrics only
        pairs.append((episode, values))
    with wrap_write_errors(path, REDIRECT_REPLAY):  # a run has its directory already
        path.parent.mkdir(parents=True, exist_ok=True)
    if experiment.tasks.regression:
        regression = [_regression_data(learner, *pair) for pair in pairs]
        return plots.plot_regression_tasks(regression, path, title)
    classification = [_classification_data(*pair) for pair in pairs]
    return plots.plot_test_tasks(classification, path, title)


def _classification_data(episode: Episode, predictions: Tensor) -> "plots.ClassificationData":
    return plots.ClassificationData(
        episode.support.inputs.numpy(),
        episode.support.targets.numpy(),
        episode.query.inputs.numpy(),
        episode.query.targets.numpy(),
        predictions.argmax(1).numpy(),
    )


def _regression_data(
    learner: Learner, episode: Episode, predictions: Tensor
) -> "plots.RegressionData":
    return plots.RegressionData(
        episode.support.inputs.numpy(),
        episode.support.targets.numpy(),
        episode.query.inputs.numpy(),
        episode.query.targets.numpy(),
        predict_before_adaptation(learner, episode.query).numpy(),
        predictions.numpy(),
    )


def predict_task(
    experiment: Experiment, learner: Learner, key: Tensor, episode: Episode
) -> Tensor | None:
    """The query predictions of an evaluation, with the task's random state, on the CPU.

    Args:
        experiment: the experiment, whose mapper is used.
        learner: the learner.
        key: the task's key, shape (4,).
        episode: the task.
    """
    batch = MetaBatch(key, episode)
    (result,) = experiment.evaluate_mapper.run_each(learner.eval(), batch)
    return None if result.predictions is None else result.predictions.detach().cpu()


@torch.no_grad()
def predict_before_adaptation(learner: Learner, queries: Examples) -> Tensor:
    """Predictions of the learner's model without adaptation, on the CPU.

    Empty if the model is not called with inputs alone, or returns no prediction per query.
    """
    device = next(learner.parameters()).device
    try:
        values = learner.eval().model(queries.inputs.to(device))
    except Exception:  # a user's model may need other arguments
        values = None
    if not isinstance(values, Tensor) or values.shape != queries.targets.shape:
        return torch.empty(0)
    return values.cpu()
