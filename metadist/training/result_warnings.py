"""Warnings about runs and results that look wrong; each is one sentence with a suggestion."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from metadist.algorithms import InnerLoopLearner, Reptile
from metadist.algorithms.batch_norm import batch_norms, batch_norms_as_in_training
from metadist.metrics import counted, larger_is_better, score
from metadist.training.experiment import Experiment, evaluation_keys

_EXPLODED = 10.0
"""A test loss is reported above this multiple of the loss of a constant prediction."""

_TASKS = 16
"""Number of test tasks for the loss of a constant prediction in regression."""


def start_warnings(experiment: Experiment) -> list[str]:
    """Warnings about a run that are known before training. The drivers call it."""
    return [*optimizer_warnings(experiment), *_batch_norm_warnings(experiment)]


def optimizer_warnings(experiment: Experiment) -> list[str]:
    """Warnings if the algorithm was not published with the run's optimizer, or if the optimizer
    leaves out parameters that require grad.
    """
    learner, optimizer = experiment.learner, type(experiment.optimizer).__name__
    published, warnings = learner.published_optimizers, []
    if published and optimizer not in published:
        remedy = "choose one with optimizer=NAME"
        if isinstance(learner, Reptile):
            remedy = "try optimizer=reptile optimizer.lr=1.0"
        warnings.append(
            f"the outer optimizer is {optimizer}, and {learner.algorithm_name} was published with "
            f"{' or '.join(published)}: {remedy}"
        )
    trained = {p for group in experiment.optimizer.param_groups for p in group["params"]}
    parameters = learner.named_parameters()
    if left_out := [n for n, p in parameters if p.requires_grad and p not in trained]:
        more = f" and {len(left_out) - 3} more" if len(left_out) > 3 else ""
        warnings.append(
            f"the optimizer has no group with {', '.join(left_out[:3])}{more}, which keep their "
            "initial values: add them to a group if they are to be trained"
        )
    return warnings


def _batch_norm_warnings(experiment: Experiment) -> list[str]:
    """A warning if adapted models are trained and evaluated with other statistics of batch norm.

    It is part of a protocol only if the user asked for it (`model.running_statistics=true`).
    """
    learner = experiment.learner
    adapts = isinstance(learner, InnerLoopLearner)
    if not adapts or "running_statistics" in experiment.configuration["model"]:
        return []
    norms = batch_norms(learner)
    running = [norm for norm in norms if norm.track_running_stats]
    with batch_norms_as_in_training(learner):  # a norm that is kept in evaluation mode stays so
        running = [norm for norm in running if norm.training]
    if not running:
        return []
    return [
        f"the model's batch norms with running statistics ({len(running)} of {len(norms)}) "
        "normalize queries with the statistics of the batch in training, and with running "
        "statistics in validation and test: if these are worse than training, set "
        "track_running_stats=False in them"
    ]


def result_warnings(experiment: Experiment, results: Mapping[str, Any]) -> list[str]:
    """Warnings about a run and the results of its test. The drivers call it.

    Args:
        experiment: the finished run.
        results: the results, as in `results.json`.
    """
    messages = (
        _skipped_warning(experiment),
        _loss_warning(experiment, results),
        _steps_warning(experiment, results),
    )
    return [*start_warnings(experiment), *filter(None, messages)]


def _skipped_warning(experiment: Experiment) -> str:
    """Warn if steps were left out, of which only the first had a warning in training."""
    skipped, steps = experiment.state.skipped_steps, experiment.state.iteration
    if not skipped:
        return ""
    verb = "was" if skipped == 1 else "were"
    return (
        f"{skipped} of {counted(steps, 'step')} {verb} skipped, because loss or gradient was not "
        "finite"
    )


def _loss_warning(experiment: Experiment, results: Mapping[str, Any]) -> str:
    """Warn if the test loss is not finite, or far above the loss of a constant prediction."""
    loss = results["test_loss"]
    remedy = "lower algorithm.inner_lr or optimizer.lr, or set trainer.clip_norm"
    if "inner_lr" not in experiment.configuration["algorithm"]:
        remedy = "lower optimizer.lr, or set trainer.clip_norm"
    if not math.isfinite(loss):
        replay = "metadist replay shows the task that an earlier warning names"
        return f"the test loss is {loss}: {remedy}; {replay}"
    if experiment.tasks.regression:
        tasks = range(min(_TASKS, experiment.trainer_config.eval_tasks))
        keys = evaluation_keys(experiment, "test", tasks)
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


def _steps_warning(experiment: Experiment, results: Mapping[str, Any]) -> str:
    """Warn if the test metric is worse after the last inner step than after an earlier one."""
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
    fewer = " or algorithm.eval_inner_steps" if best["steps"] else ""
    direction = "falls" if larger_is_better(metric) else "rises"
    return (
        f"the test {metric} {direction} with inner steps ({', '.join(names)}): lower "
        f"algorithm.inner_lr{fewer}, chosen by validation, not by this test"
    )
