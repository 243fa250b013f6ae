"""The results of a run, as in `results.json`."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from metadist.algorithms import batch_norm_protocol
from metadist.distributed import get_world_size
from metadist.metrics import is_user_metric
from metadist.tasks import EpisodeDescription, TaskDistribution, task_keys
from metadist.training.environment import environment_of
from metadist.training.evaluation import Estimate, Evaluation
from metadist.training.experiment import Experiment
from metadist.training.query_predictions import QueryPredictions

BEST_CHECKPOINT = "best by validation"
"""What the protocol calls the checkpoint of `trainer.test_checkpoint=best`."""


def results_of(
    experiment: Experiment,
    estimates: Mapping[str, Estimate],
    tested: int,
) -> dict[str, Any]:
    """The results of a run that has been tested.

    Args:
        experiment: the finished run.
        estimates: of the test.
        tested: finished outer steps of the state that was tested.
    """
    state, metric = experiment.state, experiment.metric
    result = estimates[metric]
    before = estimates.get(f"{metric}_before")
    tasks = state.iteration * experiment.trainer_config.meta_batch_size
    return {
        f"test_{metric}": result.mean,
        "ci95": result.ci95,
        "test_tasks": result.tasks,
        **({} if before is None else {f"test_{metric}_before": before.mean}),
        **steps_of(estimates, metric),
        "test_loss": estimates["loss"].mean,
        **{f"test_{name}": mean for name, mean in user_metrics(estimates).items()},
        "train_loss": state.train_loss,
        **_validation_of(experiment),
        "best_validation": state.best,
        "iterations": state.iteration,
        "tested_iteration": tested,
        # A weights file has no time of training.
        **(experiment.throughput(tasks, state.train_seconds) if state.train_seconds else {}),
        "wall_seconds": state.wall_seconds,
        "world_size": get_world_size(),
        "strategy": experiment.strategy.name,
        "seed": experiment.seed,
        "environment": environment_of(experiment),
        "method": {
            "algorithm": experiment.learner.algorithm_name,
            "options": _options(experiment.configuration["algorithm"]),
            "model": _model_options(experiment),
            **_callback_options(experiment),
        },
        "protocol": {
            **experiment.tasks.protocol(),
            "backbone": _backbone(experiment),
            **experiment.learner.protocol(),
            "split": "test",
            "eval_seed": experiment.trainer_config.eval_seed,
            "batch_norm": batch_norm_protocol(experiment.learner, experiment.learner.transductive),
            "test_tasks": result.tasks,
            "interval": "95%, 1.96 standard errors over tasks",
            "checkpoint": BEST_CHECKPOINT
            if experiment.trainer_config.test_checkpoint == "best"
            else "last",
        },
    }


def prediction_records(experiment: Experiment, evaluation: Evaluation) -> Iterator[dict[str, Any]]:
    """The lines of `test_predictions.jsonl`: predictions and metrics of each test task.

    Args:
        experiment: the finished run.
        evaluation: of the test, with predictions.

    Yields:
        `task`, its index among the test tasks; for classification `classes` (names of its classes,
        in the order of the labels), `query_images` (for each query the number of its image in its
        class, from 0), `labels` and `predictions`, for regression `targets` and `predictions` with
        six digits; "accuracy" or "mse", "loss", and the user's own metrics. `classes` and
        `query_images` are None if the dataset has no `describe`, `labels`, `targets` and
        `predictions` if the learner returns no predictions.
    """
    metric = experiment.metric
    names = [metric, "loss", *user_metrics(evaluation.estimates)]
    metrics = {name: evaluation.metrics[name].tolist() for name in names}
    keys = task_keys(
        experiment.trainer_config.eval_seed, "test", 0, range(len(evaluation.predictions))
    )
    for index, (key, queries) in enumerate(zip(keys, evaluation.predictions, strict=True)):
        yield {
            "task": index,
            **_query_record(experiment.tasks, key, queries),
            **{name: values[index] for name, values in metrics.items()},
        }


def _query_record(
    tasks: TaskDistribution, key: Tensor, queries: QueryPredictions
) -> dict[str, list | None]:
    predictions, targets = (
        (_rounded(each.tolist()) if tasks.regression else each.tolist()) or None for each in queries
    )
    if tasks.regression:
        return {"targets": targets, "predictions": predictions}
    describe = getattr(tasks, "describe", None)
    found: EpisodeDescription | None = None if describe is None else describe(key)
    return {
        "classes": None if found is None else found.classes,
        "query_images": None if found is None else found.query_images,
        "labels": targets,
        "predictions": predictions,
    }


def _rounded(rows: list[list[float]]) -> list[list[float]]:
    return [[float(f"{value:.6g}") for value in row] for row in rows]


def _model_options(experiment: Experiment) -> dict[str, Any]:
    """The class of the network as `name`, and its configured options."""
    node = experiment.configuration["model"]
    options = {key: value for key, value in node.items() if key not in ("_target_", "native")}
    return {"name": node["_target_"].rpartition(".")[2], **options}


def _callback_options(experiment: Experiment) -> dict[str, Any]:
    """Class and options of each callback, under `callbacks`; {} without any."""
    nodes = experiment.configuration.get("callbacks") or {}
    found = {
        name: {"name": node["_target_"].rpartition(".")[2], **_options(node)}
        for name, node in nodes.items()
    }
    return {"callbacks": found} if found else {}


def _options(node: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in node.items() if key != "_target_"}


def _backbone(experiment: Experiment) -> str:
    """The network in one line, such as `Conv4, filters=64, pooling=stride`.

    Batch-norm statistics are left out: the protocol has them.
    """
    name, *options = _model_options(experiment).items()
    shown = [f"{key}={value}" for key, value in options if key != "running_statistics"]
    return ", ".join([name[1], *shown])


def user_metrics(estimates: Mapping[str, Estimate]) -> dict[str, float]:
    """The means of the metrics that a learner of the user adds (`Learner.metrics`), by name.

    Args:
        estimates: of an evaluation.
    """
    return {name: each.mean for name, each in estimates.items() if is_user_metric(name)}


def _validation_of(experiment: Experiment) -> dict[str, float]:
    """The validation metric of the tested state; {} without validation."""
    state, name = experiment.state, f"validation_{experiment.metric}"
    if experiment.trainer_config.test_checkpoint == "best":
        return {name: state.best[experiment.metric]}
    return state.validation if state.validated == state.iteration else {}


def steps_of(estimates: Mapping[str, Estimate], metric: str) -> dict[str, list[dict[str, float]]]:
    """The test after each number of inner steps, under `test_{metric}_by_steps`.

    One adaptation of `eval_inner_steps` steps, evaluated after each: a list of `steps` (0 is before
    adaptation), `mean` and `ci95`. Nothing for an algorithm without inner steps.
    """
    found = {0: estimates[f"{metric}_before"]} if f"{metric}_before" in estimates else {}
    while (name := f"{metric}_after_{len(found)}") in estimates:
        found[len(found)] = estimates[name]
    if len(found) < 2:
        return {}
    rows = [{"steps": k, "mean": each.mean, "ci95": each.ci95} for k, each in found.items()]
    return {f"test_{metric}_by_steps": rows}
