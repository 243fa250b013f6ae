"""The figure of MAML's paper: how learners of several runs fit a curve, step by step."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from metadist.errors import UserError
from metadist.plots import AdaptationPicture, adaptation_panels
from metadist.tasks import Episode, Examples, Sinusoid, key_generator, task_keys
from metadist.training.checkpoints import read_checkpoint
from metadist.training.experiment import Experiment
from metadist.training.resume import checkpoints_of, restore_from, use_best

STEPS = (0, 1, 10)
"""The paper's: before, after one step, after ten."""

_POINTS = 201


def draw_adaptation(
    path: Path,
    experiments: Mapping[str, Experiment],
    tasks: int = 2,
    steps: Sequence[int] = STEPS,
) -> Path:
    """Draw the first test tasks of sinusoid runs, a panel for each run beside the others'.

    Each learner is in the state that its run's test judged, the newest checkpoint or the best
    (`trainer.test_checkpoint`), and adapts to the same points, by its own inner rate.

    Args:
        path: the PNG file to write; its folder is made.
        experiments: of finished runs, fresh, by the name to call them.
        tasks: how many curves.
        steps: after how many inner steps; 0 is before.

    Returns:
        `path`.

    Raises:
        UserError: a run of another dataset or without inner steps, runs with other numbers of
            points, or no checkpoint.
    """
    for name, x in experiments.items():
        dataset = getattr(x.tasks, "dataset", None)
        if not isinstance(dataset, Sinusoid) or not hasattr(x.learner, "eval_inner_steps"):
            raise UserError(
                f"{x.directory} ({name}) is no run of an algorithm with inner steps on "
                "dataset=sinusoid: this picture is of such runs alone."
            )
    shots = {name: x.tasks.protocol()["shots"] for name, x in experiments.items()}
    if len(set(shots.values())) > 1:
        raise UserError(
            f"the runs adapt to different numbers of points ({shots}): take runs with the same "
            "task.shots."
        )
    for x in experiments.values():
        newest = checkpoints_of(x).newest()
        if newest is None:
            raise UserError(f"{x.directory} holds no checkpoint: give a run that has trained.")
        restore_from(x, newest, read_checkpoint(newest))
        if x.trainer.test_checkpoint == "best":
            use_best(x)
    some = next(iter(experiments.values()))
    keys = task_keys(some.trainer.eval_seed, "test", 0, range(tasks))
    rows = [{name: _adapted(x, key, steps) for name, x in experiments.items()} for key in keys]
    path.parent.mkdir(parents=True, exist_ok=True)
    points = next(iter(shots.values()))
    return adaptation_panels(rows, path, f"Sinusoid: adapting to {points} points of a new curve")


def _adapted(x: Experiment, key: torch.Tensor, steps: Sequence[int]) -> AdaptationPicture:
    positions = np.linspace(-5, 5, _POINTS)
    truth = x.tasks.dataset.curve(key_generator(key), positions)
    support = x.tasks.sample(key).support
    device = next(x.learner.parameters()).device
    grid = Examples(
        *(torch.tensor(v, dtype=torch.float32).unsqueeze(1) for v in (positions, truth))
    )
    episode = Episode(*(Examples(*(t.to(device) for t in part)) for part in (support, grid)))
    learner = x.learner.eval()
    asked, predicted = learner.eval_inner_steps, {}
    for count in steps:
        with torch.no_grad():
            if count:
                learner.eval_inner_steps = count
                found = learner(episode).predictions
            else:
                found = learner.model(episode.query.inputs)
        predicted[count] = found.detach().cpu().double().numpy().ravel()
    learner.eval_inner_steps = asked
    points, values = (tensor.double().numpy().ravel() for tensor in support)
    return AdaptationPicture(positions, truth, points, values, predicted)
