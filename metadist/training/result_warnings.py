"""Warnings about results that look wrong, each one sentence that says what to try."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from metadist.algorithms import Reptile
from metadist.metrics import larger_is_better, score
from metadist.tasks import task_keys
from metadist.training.experiment import Experiment

_EXPLODED = 10.0
"""Times the loss of a constant prediction."""

_TASKS = 16
"""Test tasks from which the loss of a constant prediction is computed in regression."""


def optimizer_warnings(experiment: Experiment) -> list[str]:
    """The warning about an optimizer that the algorithm was not published with, if it is such."""
    learner, used = experiment.learner, type(experiment.optimizer).__name__
    published = learner.published_optimizers
    if not published or used in published:
        return []
    remedy = "choose one with optimizer=NAME"
    if isinstance(learner, Reptile):
        remedy = "try optimizer=reptile optimizer.lr=1.0"
    return [
        f"the outer optimizer is {used}, and {learner.algorithm_name} was published with "
        f"{' or '.join(published)}: {remedy}"
    ]


def result_warnings(experiment: Experiment, results: Mapping[str, Any]) -> list[str]:
    """What looks wrong in a run and the results of its test. The drivers call it.

    Args:
        experiment: the finished run.
        results: as in `results.json`.
    """
    found = (_loss(experiment, results), _steps(experiment, results))
    return [*optimizer_warnings(experiment), *filter(None, found)]


def _loss(experiment: Experiment, results: Mapping[str, Any]) -> str:
    """A test loss that is not finite, or far above that of a constant prediction."""
    loss = results["test_loss"]
    remedy = "lower algorithm.inner_lr or optimizer.lr, or set trainer.clip_norm"
    if "inner_lr" not in experiment.configuration["algorithm"]:
        remedy = "lower optimizer.lr, or set trainer.clip_norm"
    if not math.isfinite(loss):
        return f"the test loss is {loss}: {remedy}"
    if experiment.tasks.regression:
        keys = task_keys(experiment.trainer_config.eval_seed, "test", 0, range(_TASKS))
        targets = [experiment.tasks.sample(key).query.targets.double() for key in keys]
        constant, prediction = torch.cat(targets).square().mean().item(), "predicting 0"
    else:
        constant = math.log(max(experiment.tasks.outputs, 2))
        prediction = "the uniform distribution"
    if constant and loss > _EXPLODED * constant:
        return (
            f"the test loss {loss:.3g} is {loss / constant:.2g} times that of {prediction} "
            f"({constant:.3g}): {remedy}"
        )
    return ""


def _steps(experiment: Experiment, results: Mapping[str, Any]) -> str:
    """A test metric that is worse after the last inner step than after an earlier one."""
    metric = experiment.metric
    rows = results.get(f"test_{metric}_by_steps", [])
    if not rows:
        return ""
    best = max(rows, key=lambda row: score(row["mean"], metric))
    last = rows[-1]
    worse = score(best["mean"] - last["mean"], metric)
    if not worse > math.hypot(best["ci95"], last["ci95"]):
        return ""
    names = [f"{row['mean']:.3g} after {row['steps']}" for row in (best, last)]
    fewer = f", or set algorithm.eval_inner_steps={best['steps']}" if best["steps"] else ""
    direction = "falls" if larger_is_better(metric) else "rises"
    return (
        f"the test {metric} {direction} with inner steps ({', '.join(names)}): lower "
        f"algorithm.inner_lr{fewer}"
    )
