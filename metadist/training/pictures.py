"""The pictures that a finished run leaves: its learning curves and some of its test tasks."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from metadist.algorithms import Learner
from metadist.loggers import read_metrics
from metadist.plots import (
    EpisodePicture,
    RegressionPicture,
    learning_curves,
    regression_tasks,
    test_episodes,
)
from metadist.tasks import Episode, TaskDistribution, task_keys

_TASKS = 4


def draw_pictures(
    directory: Path,
    headline: str,
    tasks: TaskDistribution,
    learner: Learner,
    seed: int,
    results: Mapping[str, Any],
) -> list[Path]:
    """Draw a run's pictures into its directory. Rank zero calls it, after the test.

    Args:
        directory: the run's directory, with its `metrics.jsonl`.
        headline: the pictures' title.
        tasks: test tasks come from here: the first few of the test.
        learner: the trained learner.
        seed: keys the test tasks.
        results: what `results.json` holds.

    Returns:
        The files written: the curves, and the tasks where they are images in grey or colour or
        one number as a function of another.
    """
    metric = "mse" if tasks.regression else "accuracy"
    curves = learning_curves(
        read_metrics(directory / "metrics.jsonl"),
        directory / "learning_curves.png",
        headline,
        (results[f"test_{metric}"], results["ci95"]),
    )
    if not _can_be_drawn(tasks):
        return [curves]
    learner.eval()
    episodes = [tasks.sample(key) for key in task_keys(seed, "test", 0, range(_TASKS))]
    return [curves, _draw(tasks, learner, episodes, directory / "test_tasks.png", headline)]


def draw_task(path: Path, tasks: TaskDistribution, learner: Learner, key: Tensor) -> Path | None:
    """Draw one task and what the learner makes of it after adaptation.

    Args:
        path: the PNG file to write; its folder is made.
        tasks: where the task comes from.
        learner: put into evaluation mode.
        key: the task's, of shape (4,).

    Returns:
        `path`, or None for tasks that have no picture: without a support set, of inputs that are
        no images in grey or colour, or of a function of several numbers.
    """
    episode = tasks.sample(key)
    if not len(episode.support.targets) or not _can_be_drawn(tasks):
        return None
    path.parent.mkdir(parents=True, exist_ok=True)
    title = f"task {','.join(map(str, key.tolist()))}"
    learner.eval()
    return _draw(tasks, learner, [episode], path, title)


def _can_be_drawn(tasks: TaskDistribution) -> bool:
    """Images in grey or in colour, or one number as a function of another."""
    if tasks.regression:
        return tasks.input_shape == (1,) and tasks.outputs == 1
    return len(tasks.input_shape) == 3 and tasks.input_shape[0] in (1, 3)


def _draw(
    tasks: TaskDistribution, learner: Learner, episodes: list[Episode], path: Path, title: str
) -> Path:
    if tasks.regression:
        return regression_tasks([_regression(learner, each) for each in episodes], path, title)
    return test_episodes([_classes(learner, each) for each in episodes], path, title)


def _classes(learner: Learner, episode: Episode) -> EpisodePicture:
    return EpisodePicture(
        episode.support.inputs.numpy(),
        episode.support.targets.numpy(),
        episode.query.inputs.numpy(),
        episode.query.targets.numpy(),
        _predict(learner, episode).argmax(1).numpy(),
    )


def _regression(learner: Learner, episode: Episode) -> RegressionPicture:
    with torch.no_grad():
        device = next(learner.parameters()).device
        before = learner.model(episode.query.inputs.to(device)).cpu()
    return RegressionPicture(
        episode.support.inputs.numpy(),
        episode.support.targets.numpy(),
        episode.query.inputs.numpy(),
        episode.query.targets.numpy(),
        before.numpy(),
        _predict(learner, episode).numpy(),
    )


def _predict(learner: Learner, episode: Episode) -> torch.Tensor:
    device = next(learner.parameters()).device
    moved = Episode(*(type(part)(*(tensor.to(device) for tensor in part)) for part in episode))
    predictions = learner(moved).predictions
    assert predictions is not None, "a learner gives its predictions in evaluation"
    return predictions.detach().cpu()
