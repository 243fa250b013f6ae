"""Numbers that went wrong: which task they come from."""

from typing import NamedTuple

import torch
from torch import Tensor

from metadist.algorithms import Learner
from metadist.distributed.reducers import finish_sum
from metadist.tasks import SPLITS, Episode, Examples
from metadist.training.experiment import Experiment
from metadist.training.mappers import MetaBatch, TaskMapper, TrainTasks
from metadist.training.outer_step import Outcome, meta_batch, training_keys


class DiagnoseTasks(TaskMapper):
    """Mapper of diagnosis: loss and gradient norm of each task, one by one, as in training."""

    def __call__(self, learner: Learner, batch: MetaBatch) -> dict[str, Tensor]:
        """Returns "loss" and "gradient_norm", float64 of shape (tasks in the shard,), on the CPU.

        The norm is that of the task's own gradient by all parameters that are trained.
        """
        losses, norms = [], []
        for single in _one_by_one(batch):
            loss, gradients = task_gradient(self, learner, single)
            squares = [g.double().square().sum() for g in gradients.values() if g is not None]
            losses.append(loss.double().cpu())
            norms.append(torch.stack(squares).sum().sqrt().cpu() if squares else torch.zeros(()))
        return {"loss": torch.stack(losses), "gradient_norm": torch.stack(norms).double()}


def task_gradient(
    mapper: TaskMapper, learner: Learner, task: MetaBatch
) -> tuple[Tensor, dict[str, Tensor | None]]:
    """The loss of one task, detached, and its derivative by each parameter that is trained.

    Args:
        mapper: draws the task.
        learner: from which the task starts; its parameters and buffers stay as they are.
        task: a single one.
    """
    trained = {name: p for name, p in learner.named_parameters() if p.requires_grad}
    as_in_training = TrainTasks(mapper.tasks, mapper.device, mapper.tasks_at_once)
    calls = [((learner, task), {})]
    with torch.enable_grad():
        answer = as_in_training.weighted_sum(calls, [1.0], list(trained.values()))
    loss = finish_sum(answer.value, None, answer.dtypes or []).loss
    found = answer.gradients.by_input if answer.gradients else [None] * len(trained)
    return loss, dict(zip(trained, found, strict=True))


class Culprit(NamedTuple):
    """Where numbers that are not finite come from.

    Attributes:
        words: what was found, the beginning of a sentence.
        key: the first task's key as people write it, "" where no task is to blame.
    """

    words: str
    key: str


def find_culprit(experiment: Experiment, iteration: int, outcome: Outcome) -> Culprit:
    """Which tasks made an iteration's loss or gradient NaN or infinite.

    It computes the meta-batch once more, task by task, so that finding out costs nothing as long
    as all goes well. Called before the step, by all ranks that run the loop.
    """
    x = experiment
    wrong = [
        name for name, tensor in x.learner.named_parameters() if not torch.isfinite(tensor).all()
    ]
    if wrong:
        return Culprit(
            f"iteration {iteration}: {wrong[0]} is not finite before the step, so that no task "
            f"can be computed (loss {outcome.loss})",
            "",
        )
    keys = training_keys(x, iteration)
    mapper = DiagnoseTasks(x.train_mapper.tasks, x.train_mapper.device)
    figures = x.strategy.collect(mapper, x.learner, meta_batch(x, keys))
    bad = ~(figures["loss"].isfinite() & figures["gradient_norm"].isfinite())
    if not bad.any():
        return Culprit(
            f"iteration {iteration}: loss {outcome.loss}, gradient norm {outcome.gradient_norm}, "
            "though every task by itself has finite ones",
            "",
        )
    first = int(bad.nonzero()[0])
    key = key_text(keys[first])
    return Culprit(
        f"iteration {iteration}: {int(bad.sum())} of {len(keys)} tasks went wrong, first "
        f"the one with key {key} (loss {figures['loss'][first].item()}, "
        f"gradient norm {figures['gradient_norm'][first].item()})",
        key,
    )


def key_text(key: Tensor) -> str:
    """A task's key of shape (4,) as people write it: "0,train,5,3"."""
    seed, split, iteration, index = key.tolist()
    return f"{seed},{SPLITS[split]},{iteration},{index}"


def _one_by_one(batch: MetaBatch) -> list[MetaBatch]:
    if batch.keys.dim() == 1:
        return [batch]
    episodes: list[Episode | None] = [None] * len(batch.keys)
    if batch.episodes is not None:
        episodes = [
            Episode(*(Examples(part.inputs[i], part.targets[i]) for part in batch.episodes))
            for i in range(len(batch.keys))
        ]
    return [MetaBatch(key, episode) for key, episode in zip(batch.keys, episodes, strict=True)]
