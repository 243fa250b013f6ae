"""The results of a run, as in `results.json`."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from metadist.algorithms import batch_norm_protocol
from metadist.distributed import get_world_size
from metadist.metrics import is_user_metric
from metadist.tasks import EpisodeDescription, TaskDistribution
from metadist.training.environment import environment_of
from metadist.training.evaluation import Estimate, Evaluation
from metadist.training.experiment import Experiment, evaluation_keys
from metadist.training.query_predictions import QueryPredictions

BEST_CHECKPOINT = "best by validation"
"""The protocol's name for the checkpoint of `trainer.test_checkpoint=best`."""


def results_of(
    experiment: Experiment,
    estimates: Mapping[str, Estimate],
    tested: int,
) -> dict[str, Any]:
    """The results of a run that has been tested.

    Args:
        experiment: the finished run.
        estimates: the estimates of the test.
        tested: number of finished outer steps of the state that was tested.
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
        **({"train_loss": state.train_loss} if state.iteration else {}),
        **_validation_of(experiment),
        "best_validation": state.best,
        "iterations": state.iteration,
        **({"skipped_steps": state.skipped_steps} if state.skipped_steps else {}),
        "tested_iteration": tested,
        # A weights file has no training time.
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
        evaluation: the evaluation of the test tasks, with predictions.

    Yields:
        `task`, the index among the test tasks; for classification `classes` (the names of the
        task's classes, in the order of the labels), `query_images` (for each query the number of
        its image in its class, from 0), `labels` and `predictions`; for regression `targets` and
        `predictions` with six digits; "accuracy" or "mse", "loss", and the user's own metrics.
        `classes` and `query_images` are None if the dataset has no `describe`; `labels`, `targets`
        and `predictions` are None if the learner returns no predictions.
    """
    metric = experiment.metric
    names = [metric, "loss", *filter(is_user_metric, evaluation.metrics)]
    metrics = {name: evaluation.metrics[name].tolist() for name in names}
    keys = evaluation_keys(experiment, "test", range(len(evaluation.predictions)))
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
        (_rounded(tensor.tolist()) if tasks.regression else tensor.tolist()) or None
        for tensor in queries
    )
    if tasks.regression:
        return {"targets": targets, "predictions": predictions}
    describe = getattr(tasks, "describe", None)
    description: EpisodeDescription | None = None if describe is None else describe(key)
    return {
        "classes": None if description is None else description.classes,
        "query_images": None if description is None else description.query_images,
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
    """Class and options of each callback, under `callbacks`; {} without callbacks."""
    nodes = experiment.configuration.get("callbacks") or {}
    callbacks = {
        name: {"name": node["_target_"].rpartition(".")[2], **_options(node)}
        for name, node in nodes.items()
    }
    return {"callbacks": callbacks} if callbacks else {}


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
        estimates: the estimates of an evaluation.
    """
    return {name: value.mean for name, value in estimates.items() if is_user_metric(name)}


def _validation_of(experiment: Experiment) -> dict[str, float]:
    """The validation metric of the tested state; {} without validation."""
    state, name = experiment.state, f"validation_{experiment.metric}"
    if experiment.trainer_config.test_checkpoint == "best":
        return {name: state.best[experiment.metric]}
    return state.validation if state.validated == state.iteration else {}


def steps_of(estimates: Mapping[str, Estimate], metric: str) -> dict[str, list[dict[str, float]]]:
    """The test metric after each number of inner steps, under `test_{metric}_by_steps`.

    One adaptation of `eval_inner_steps` steps is evaluated after each step: a list of `steps` (0 is
    before adaptation), `mean` and `ci95`. {} for an algorithm without inner steps.
    """
    by_steps = {0: estimates[f"{metric}_before"]} if f"{metric}_before" in estimates else {}
    while (name := f"{metric}_after_{len(by_steps)}") in estimates:
        by_steps[len(by_steps)] = estimates[name]
    if len(by_steps) < 2:
        return {}
    rows = [{"steps": k, "mean": value.mean, "ci95": value.ci95} for k, value in by_steps.items()]
    return {f"test_{metric}_by_steps": rows}
