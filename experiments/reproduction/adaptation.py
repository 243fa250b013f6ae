"""Plots of the adaptation to a curve by number of inner steps, one column per learner."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from metadist.errors import UserError
from metadist.metrics import counted
from metadist.plots.style import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    PURPLE,
    RED,
    new_figure,
    save_figure,
    style_axes,
)
from metadist.tasks import (
    Episode,
    Examples,
    Sinusoid,
    TaskDistribution,
    key_generator,
    task_keys,
)
from metadist.training import Experiment
from metadist.training.resume import restore_from
from metadist.training.run_plots import predict_before_adaptation, predict_task
from metadist.training.saved_state import load_learner_state, tested_checkpoint

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STEPS = (0, 1, 10)  # as in MAML's paper
_INPUTS = 201
_LINES = ((GREEN, ":"), (BLUE, "--"), (ORANGE, "-"), (RED, "-."))


class AdaptationData(NamedTuple):
    """The predictions of a learner for one curve.

    Attributes:
        inputs: the inputs, ascending, shape (m,).
        targets: the values of the curve at `inputs`, shape (m,).
        support_inputs: the inputs of the support set, shape (n,).
        support_targets: the targets of the support set, shape (n,).
        predictions: the predictions at `inputs`, shape (m,), by number of inner steps; 0 is before
            adaptation.
    """

    inputs: np.ndarray
    targets: np.ndarray
    support_inputs: np.ndarray
    support_targets: np.ndarray
    predictions: Mapping[int, np.ndarray]


def plot_adaptation(
    path: Path,
    experiments: Mapping[str, Experiment],
    tasks: int = 2,
) -> Path:
    """Plot adaptation to the first test tasks of sinusoid runs, one column per run.

    Each learner has the state that its run tested, the newest or the best checkpoint
    (`trainer.test_checkpoint`). All adapt to the same points, each with its own inner learning
    rate.

    Args:
        path: the PNG file to write; its folder is created.
        experiments: newly built experiments of finished runs, by name.
        tasks: number of curves.

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
        {name: _adaptation_data(experiment, key) for name, experiment in experiments.items()}
        for key in keys
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    points = next(iter(shots.values()))
    title = f"Sinusoid: adapting to {points} points of a new curve"
    return plot_rows(rows, path, title)


def _is_sinusoid(tasks: TaskDistribution) -> bool:
    return isinstance(getattr(tasks, "dataset", None), Sinusoid)


def _adaptation_data(experiment: Experiment, key: Tensor) -> AdaptationData:
    tasks: Any = experiment.tasks
    inputs = np.linspace(-5, 5, _INPUTS)
    targets = tasks.dataset.curve(key_generator(key), inputs)
    support = tasks.sample(key).support
    grid = (torch.tensor(array, dtype=torch.float32).unsqueeze(1) for array in (inputs, targets))
    episode = Episode(support, Examples(*grid))
    learner: Any = experiment.learner
    eval_inner_steps, predictions = learner.eval_inner_steps, {}
    for count in _STEPS:
        if count:
            learner.eval_inner_steps = count
            values = predict_task(experiment, learner, key, episode)
            assert values is not None, "algorithms with inner steps return predictions"
        else:
            values = predict_before_adaptation(learner, episode.query)
        predictions[count] = values.double().numpy().ravel()
    learner.eval_inner_steps = eval_inner_steps
    support_inputs, support_targets = (part.double().numpy().ravel() for part in support)
    return AdaptationData(inputs, targets, support_inputs, support_targets, predictions)


def plot_rows(rows: Sequence[Mapping[str, AdaptationData]], path: Path, title: str) -> Path:
    """Plot one row per curve with one column per learner.

    Args:
        rows: for each curve the data of each learner by name, with the same names in every row.
        path: the PNG file to write.
        title: the title, in one line.

    Returns:
        `path`.

    Raises:
        UserError: the file cannot be written.
    """
    columns = len(rows[0])
    figure = new_figure(5.2 * columns, 3.5 * len(rows) + 1.1, title)
    grid = figure.subplots(len(rows), columns, squeeze=False, sharex=True, sharey="row")
    for axes_row, row in zip(grid, rows, strict=True):
        _set_limits(axes_row[0], row.values())
        for axes, (name, data) in zip(axes_row, row.items(), strict=True):
            _plot_learner(axes, name, data)
        axes_row[0].set_ylabel("output")
    for axes in grid[-1]:
        axes.set_xlabel("input")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=len(labels), fontsize=9, frameon=False
    )
    return save_figure(figure, path)


def _plot_learner(axes: "Axes", name: str, data: AdaptationData) -> None:
    axes.plot(data.inputs, data.targets, color=INK, linewidth=2.6, alpha=0.35, label="truth")
    errors = []
    for index, (steps, values) in enumerate(data.predictions.items()):
        color, style = _LINES[index % len(_LINES)]
        label = f"after {counted(steps, 'step')}" if steps else "before"
        axes.plot(data.inputs, values, style, color=color, linewidth=1.7, label=label)
        errors.append(f"{np.mean((values - data.targets) ** 2):.2g}")
    axes.scatter(
        data.support_inputs,
        data.support_targets,
        color=PURPLE,
        marker="^",
        s=44,
        zorder=3,
        label="points used",
    )
    axes.set_title(f"{name}: MSE {' → '.join(errors)}", fontsize=10, parse_math=False)
    style_axes(axes)


def _set_limits(axes: "Axes", row: Iterable[AdaptationData]) -> None:
    """Fits the limits to the predictions; cuts off diverging ones to keep the curve visible."""
    target_height, prediction_height = 0.0, 0.0
    for data in row:
        predictions = np.concatenate(list(data.predictions.values()))
        finite = predictions[np.isfinite(predictions)]
        target_height = max(target_height, float(np.abs(data.targets).max()))
        prediction_height = max(prediction_height, float(np.abs(finite).max(initial=0.0)))
    height = 1.1 * max(target_height, min(prediction_height, 2 * target_height + 2))
    axes.set_ylim(-height, height)
