"""Plots of runs: learning curves, test tasks, and adaptation of sinusoid learners by step."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from metadist import plots
from metadist import tasks as tasks_package
from metadist.algorithms import Learner
from metadist.errors import UserError
from metadist.files import wrap_write_errors
from metadist.loggers import METRICS_FILE, read_metrics
from metadist.reports import LEARNING_CURVES_FILE, TEST_TASKS_FILE, VALIDATION_TASKS_FILE
from metadist.tasks import (
    Episode,
    Examples,
    TaskDistribution,
    key_generator,
    task_keys,
)
from metadist.training.experiment import Experiment
from metadist.training.resume import restore_from
from metadist.training.saved_state import load_learner_state, tested_checkpoint
from metadist.training.task_mapper import MetaBatch

_TEST_TASKS = 4

_ADAPTATION_STEPS = (0, 1, 10)  # as in MAML's paper
_ADAPTATION_INPUTS = 201


def plot_run(experiment: Experiment, results: Mapping[str, Any]) -> list[Path]:
    """Plot the learning curves and the first test tasks of a run. Rank zero calls it.

    Args:
        experiment: the finished run, with `metrics.jsonl` in its directory.
        results: the content of `results.json`.

    Returns:
        The files written: the learning curves, and the test tasks if they are images in grey or
        color, or scalar functions of a scalar, and the learner returns a prediction per query.
    """
    curves = plots.plot_learning_curves(
        read_metrics(experiment.directory / METRICS_FILE),
        experiment.directory / LEARNING_CURVES_FILE,
        experiment.title,
        (results[f"test_{experiment.metric}"], results["ci95"]),
        experiment.split_descriptions,
    )
    if not can_plot(experiment.tasks):
        return [curves]
    count = min(_TEST_TASKS, experiment.trainer_config.eval_tasks)
    keys = task_keys(experiment.trainer_config.eval_seed, "test", 0, range(count))
    plotted = _plot_tasks(
        experiment,
        experiment.evaluated_learner,
        keys,
        experiment.directory / TEST_TASKS_FILE,
        experiment.title,
    )
    return [curves] if plotted is None else [curves, plotted]


def plot_validation_tasks(experiment: Experiment) -> list[Path]:
    """Plot the first validation tasks with the predictions of the current state.

    Rank zero calls it during training: neither buffers nor random states change.

    Returns:
        The file written, `validation_tasks.png`; [] if `plot_run` would plot no test tasks.
    """
    count = min(_TEST_TASKS, experiment.trainer_config.validation_tasks)
    keys = task_keys(experiment.trainer_config.eval_seed, "validation", 0, range(count))
    if not can_plot(experiment.tasks) or not len(experiment.tasks.sample(keys[0]).support.targets):
        return []
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
    if not can_plot(experiment.tasks) or not len(experiment.tasks.sample(key).support.targets):
        return None
    with wrap_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    return _plot_tasks(
        experiment, experiment.learner, [key], path, f"task {','.join(map(str, key.tolist()))}"
    )


def plot_adaptation(
    path: Path,
    experiments: Mapping[str, Experiment],
    tasks: int = 2,
    steps: Sequence[int] = _ADAPTATION_STEPS,
) -> Path:
    """Plot adaptation to the first test tasks of sinusoid runs, one column per run.

    Each learner has the state that its run tested, the newest or the best checkpoint
    (`trainer.test_checkpoint`). All adapt to the same points, each with its own inner learning
    rate.

    Args:
        path: the PNG file to write; its folder is created.
        experiments: newly built experiments of finished runs, by name.
        tasks: number of curves.
        steps: numbers of inner steps; 0 is before adaptation.

    Returns:
        `path`.

    Raises:
        UserError: a run has another dataset, no inner steps or no checkpoint, or the runs have
            different `task.shots`.

    Source: Finn et al. (2017), arXiv 1703.03400, figure 2.
    """
    for name, experiment in experiments.items():
        if not (_is_sinusoid(experiment.tasks) and hasattr(experiment.learner, "eval_inner_steps")):
            raise UserError(
                f"{experiment.directory} ({name}) is no run of an algorithm with inner steps on "
                "dataset=sinusoid: adaptation can be plotted for such runs only."
            )
    shots = {name: experiment.tasks.protocol()["shots"] for name, experiment in experiments.items()}
    if len(set(shots.values())) > 1:
        raise UserError(
            f"the runs adapt to different numbers of points ({shots}): take runs with the same "
            "task.shots."
        )
    for experiment in experiments.values():
        checkpoint, contents = tested_checkpoint(experiment.directory)
        restore_from(experiment, checkpoint, contents)
        load_learner_state(experiment.learner, contents)
    eval_seed = next(iter(experiments.values())).trainer_config.eval_seed
    keys = task_keys(eval_seed, "test", 0, range(tasks))
    rows = [
        {name: _adaptation_data(experiment, key, steps) for name, experiment in experiments.items()}
        for key in keys
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    points = next(iter(shots.values()))
    title = f"Sinusoid: adapting to {points} points of a new curve"
    return plots.plot_adaptation(rows, path, title)


def _is_sinusoid(tasks: TaskDistribution) -> bool:
    return isinstance(getattr(tasks, "dataset", None), tasks_package.Sinusoid)


def can_plot(tasks: TaskDistribution) -> bool:
    """Whether tasks are images in grey or color, or scalar functions of a scalar."""
    if tasks.regression:
        return tasks.input_shape == (1,) and tasks.outputs == 1
    return len(tasks.input_shape) == 3 and tasks.input_shape[0] in (1, 3)


def _plot_tasks(
    experiment: Experiment, learner: Learner, keys: Iterable[Tensor], path: Path, title: str
) -> Path | None:
    pairs = []
    for key in keys:
        episode = experiment.tasks.sample(key)
        values = _predict(experiment, learner, key, episode)
        if values is None or values.dim() != 2 or len(values) != len(episode.query.targets):
            return None  # an algorithm may compute losses and metrics only
        pairs.append((episode, values))
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


def _adaptation_data(
    experiment: Experiment, key: Tensor, steps: Sequence[int]
) -> "plots.AdaptationData":
    tasks: Any = experiment.tasks
    inputs = np.linspace(-5, 5, _ADAPTATION_INPUTS)
    targets = tasks.dataset.curve(key_generator(key), inputs)
    support = tasks.sample(key).support
    grid = (torch.tensor(array, dtype=torch.float32).unsqueeze(1) for array in (inputs, targets))
    episode = Episode(support, Examples(*grid))
    learner: Any = experiment.learner
    eval_inner_steps, predictions = learner.eval_inner_steps, {}
    for count in steps:
        if count:
            learner.eval_inner_steps = count
            values = _predict(experiment, learner, key, episode)
            assert values is not None, "algorithms with inner steps return predictions"
        else:
            values = predict_before_adaptation(learner, episode.query)
        predictions[count] = values.double().numpy().ravel()
    learner.eval_inner_steps = eval_inner_steps
    support_inputs, support_targets = (part.double().numpy().ravel() for part in support)
    return plots.AdaptationData(inputs, targets, support_inputs, support_targets, predictions)


def _predict(
    experiment: Experiment, learner: Learner, key: Tensor, episode: Episode
) -> Tensor | None:
    """The query predictions of an evaluation, with the task's random state, on the CPU."""
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
    except TypeError:
        values = None
    if not isinstance(values, Tensor) or values.shape != queries.targets.shape:
        return torch.empty(0)
    return values.cpu()
