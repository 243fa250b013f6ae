"""Non-finite losses and gradients: which tasks they come from."""

import shlex
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metadist.algorithms import Learner
from metadist.distributed.reducers import finish_sum
from metadist.reports import trust_option
from metadist.tasks import SPLITS
from metadist.training.experiment import Experiment, make_batch
from metadist.training.task_mapper import (
    TASK_INDEX,
    MetaBatch,
    TaskMapper,
    TrainMapper,
    order_of_tasks,
)


class NonFiniteReport(NamedTuple):
    """Where a non-finite loss or gradient comes from.

    Attributes:
        message: the finding, as the beginning of a sentence.
        key: the first non-finite task's key as text; "" if no single task is non-finite.
        parameters: whether parameters were not finite before the step.
        diverged: whether none of several tasks is finite; others then probably are not either.
    """

    message: str
    key: str
    parameters: bool = False
    diverged: bool = False


def find_non_finite(
    experiment: Experiment, keys: Tensor, iteration: int, loss: float, gradient_norm: float
) -> NonFiniteReport:
    """Find the tasks that made an iteration's loss or gradient NaN or infinite.

    It computes the meta-batch again, one task at a time. The drivers call it, before the
    optimizer's step.

    Args:
        experiment: the run's experiment.
        keys: the keys of the meta-batch's tasks, shape (tasks, 4).
        iteration: the number of the step.
        loss: the loss of the meta-batch.
        gradient_norm: the norm of the meta-batch's gradient.
    """
    parameters = experiment.learner.named_parameters()
    names = [name for name, tensor in parameters if not torch.isfinite(tensor).all()]
    if names:
        return NonFiniteReport(
            f"iteration {iteration}: {names[0]} is not finite before the step, so that no task "
            f"can be computed (loss {loss})",
            "",
            parameters=True,
        )
    mapper = GradientNormMapper(**_shared_fields(experiment.train_mapper))
    values = experiment.strategy.map_tasks(mapper, experiment.learner, make_batch(experiment, keys))
    order = order_of_tasks(values[TASK_INDEX], keys)
    values = {name: value[order] for name, value in values.items()}
    non_finite = ~(values["loss"].isfinite() & values["gradient_norm"].isfinite())
    if not non_finite.any():
        return NonFiniteReport(
            f"iteration {iteration}: loss {loss}, gradient norm {gradient_norm}, "
            "though every task by itself has finite ones",
            "",
        )
    first = int(non_finite.nonzero()[0])
    key = format_key(keys[first])
    return NonFiniteReport(
        f"iteration {iteration}: {int(non_finite.sum())} of {len(keys)} tasks are not finite, "
        f"first the one with key {key} (loss {values['loss'][first].item()}, "
        f"gradient norm {values['gradient_norm'][first].item()})",
        key,
        diverged=len(keys) > 1 and bool(non_finite.all()),
    )


def stop_message(report: NonFiniteReport, experiment: Experiment, iteration: int) -> str:
    """The error message of a run that stops because of a non-finite loss or gradient.

    Args:
        report: the iteration's report.
        experiment: the run's experiment.
        iteration: the number of the step. The state before it has been saved, unless it is 1 or
            parameters were not finite.
    """
    if report.parameters:
        return (
            f"{report.message}: an earlier step changed it so; start another run with a lower "
            "optimizer.lr or with trainer.clip_norm, or from an earlier checkpoint with "
            "init_from=FILE."
        )
    remedies = [_replay_hint(report, experiment)]
    inner = _inner_rate(experiment)
    if iteration == 1:  # the optimizer has taken no step
        remedies += [inner and f"start another run with a lower {inner}"]
        remedies += ["" if report.diverged else "start with trainer.on_non_finite=skip"]
    else:
        rates = " or ".join(filter(None, ("optimizer.lr", inner)))
        remedy = f"start another run with a lower {rates} or with trainer.clip_norm"
        if report.diverged:  # with the saved weights, every later step would be skipped
            remedies += [remedy]
        else:
            remedies += [
                f"{remedy} (init_from=RUN keeps the weights)",
                "resume with trainer.on_non_finite=skip",
            ]
    *others, last = filter(None, remedies)
    advice = f"{', '.join(others)}, or {last}" if others else last
    return f"{report.message}: stopped before the step; {advice}."


def warning_message(report: NonFiniteReport, experiment: Experiment, iteration: int) -> str:
    """The warning of a run that continues after a non-finite loss or gradient.

    Args:
        report: the iteration's report.
        experiment: the run's experiment.
        iteration: the number of the step.
    """
    skipped = experiment.trainer_config.on_non_finite == "skip"
    done = "the step was skipped" if skipped else "the step was taken all the same"
    remedy = "trainer.clip_norm"
    if iteration == 1:  # clipping does not help, and the optimizer has taken no step
        remedy = f"a lower {inner}" if (inner := _inner_rate(experiment)) else ""
    advice = (_replay_hint(report, experiment), remedy and f"consider {remedy}")
    parts = (
        f"{report.message}: {done}",
        ", ".join(filter(None, advice)),
        "later skipped steps are only counted" if skipped else "",
    )
    return "; ".join(filter(None, parts))


def _inner_rate(experiment: Experiment) -> str:
    """The key of the algorithm's inner learning rate; "" without one."""
    return "algorithm.inner_lr" if "inner_lr" in experiment.configuration["algorithm"] else ""


def _replay_hint(report: NonFiniteReport, experiment: Experiment) -> str:
    if not report.key:
        return ""
    trust = trust_option(experiment.configuration)
    run = shlex.quote(str(experiment.directory))
    return f"look at it with metadist replay {run} --key {report.key}{trust}"


class GradientNormMapper(TaskMapper):
    """Mapper that computes loss and gradient norm of each task, as in training."""

    def __call__(self, learner: Learner, batch: MetaBatch) -> dict[str, Tensor]:
        """Returns "loss" and "gradient_norm", float64, and `TASK_INDEX`, of shape (tasks in the
        shard,), on the CPU.

        The norm is the norm of the task's own gradient with respect to all parameters that require
        grad.
        """
        batch = batch.with_task_dimension()
        losses, norms = [], []
        for index in range(batch.size):
            task = batch.select(slice(index, index + 1))
            loss, gradients = task_gradient(self, learner, task)
            squares = [g.double().square().sum() for g in gradients.values() if g is not None]
            losses.append(loss.double().cpu())
            norms.append(torch.stack(squares).sum().sqrt().cpu() if squares else torch.zeros(()))
        return {
            "loss": torch.stack(losses),
            "gradient_norm": torch.stack(norms).double(),
            TASK_INDEX: batch.keys[:, 3],
        }


def task_gradient(
    mapper: TaskMapper, learner: Learner, task: MetaBatch
) -> tuple[Tensor, dict[str, Tensor | None]]:
    """The detached loss of one task, and its gradient by names of the parameters that require grad.

    Args:
        mapper: the mapper that samples the task.
        learner: the learner; its parameters and buffers are not changed.
        task: a batch of a single task.
    """
    trainable = {name: p for name, p in learner.named_parameters() if p.requires_grad}
    train_mapper = TrainMapper(**_shared_fields(mapper))
    with torch.enable_grad():
        response = train_mapper.weighted_sum(
            [((learner, task), {})], [1.0], list(trainable.values())
        )
    loss = finish_sum(response.value, None, response.dtypes or []).loss
    gradients = response.gradients.by_input if response.gradients else [None] * len(trainable)
    return loss, dict(zip(trainable, gradients, strict=True))


def _shared_fields(mapper: TaskMapper) -> dict[str, Any]:
    """The fields that all mappers share."""
    return {field.name: getattr(mapper, field.name) for field in fields(TaskMapper)}


def format_key(key: Tensor) -> str:
    """A task's key of shape (4,) as text: "0,train,5,3" for seed, split, iteration, index."""
    seed, split, iteration, index = key.tolist()
    return f"{seed},{SPLITS[split]},{iteration},{index}"
