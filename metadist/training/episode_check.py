"""Checks before training of the tasks that a dataset, or the user's own class of tasks, gives."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from metadist.algorithms import Learner, Prototypical, Supervised
from metadist.errors import UserError
from metadist.tasks import (
    Episode,
    EpisodeDescription,
    Examples,
    FewShotTasks,
    SupervisedTasks,
    TaskDistribution,
    task_keys,
)

ALGORITHMS = "metadist.algorithms."
"""The package of the algorithms that are not the user's own."""


def check_episodes(tasks: TaskDistribution, learner: Learner, split: str) -> None:
    """Check that tasks have the right types, and are the same for equal keys. Any rank calls it.

    Args:
        tasks: this rank's tasks.
        learner: the learner, on its device.
        split: the split of which tasks are sampled.

    Raises:
        UserError: a task or its description has another type, a task has wrong or NaN values or no
            queries, or it differs from the task of the same key.
    """
    key = task_keys(0, split, 0, range(1))[0]
    episode, repeated = tasks.sample(key), tasks.sample(key)
    # The user's own class, or the dataset whose episodes metadist's class returns.
    sample = getattr(type(tasks), "sample", None)
    own = sample not in (FewShotTasks.sample, SupervisedTasks.sample)
    name = type(tasks if own else getattr(tasks, "dataset", tasks)).__name__
    parts = list(episode) if isinstance(episode, Episode) else [episode]
    if not all(isinstance(part, Examples) for part in parts):
        raise UserError(
            f"{name} gives {', '.join(f'a {type(part).__name__}' for part in parts)} as a task: "
            "return metadist.tasks.Episode(Examples(inputs, targets), Examples(inputs, targets))."
        )
    for part, examples, again in zip(Episode._fields, episode, repeated, strict=True):
        for field, value, value_again in zip(Examples._fields, examples, again, strict=True):
            subject = f"{name} gives {part}.{field}"
            _check_values(value, subject, list(learner.parameters()))
            if field == "targets" and learner.regression and not value.is_floating_point():
                raise UserError(
                    f"{subject} of {value.dtype}: give floating-point numbers for regression, as "
                    "by .float()."
                )
            if field == "targets" and not learner.regression:
                outputs = tasks.outputs if learner.outputs_are_classes else None
                _check_classes(value, subject, outputs)
                count = len(examples.inputs)
                if type(learner).__module__.startswith(ALGORITHMS) and len(value) != count:
                    raise UserError(
                        f"{subject} for {len(value)} of {count} inputs: give one for each."
                    )
            if not torch.equal(value, value_again):
                source = "key_generator(key)" if own else "the generator that it is given"
                raise UserError(
                    f"{name} gives two different tasks for one key: draw every random number from "
                    f"{source}."
                )
    if not len(episode.query.targets):
        raise UserError(f"{name} gives a {split} task without queries: give at least one.")
    describe = getattr(tasks, "describe", None) if split == "test" else None
    description = None if describe is None else describe(key)
    if not isinstance(description, EpisodeDescription | None):
        raise UserError(
            f"describe, of {name} or of {type(tasks).__name__}, returns a "
            f"{type(description).__name__}: return a metadist.tasks.EpisodeDescription, or None."
        )
    _check_sample_batch(tasks, split, name, own)
    if isinstance(learner, Prototypical | Supervised):
        _check_classes_of_support(episode, name)


def _check_values(value: Any, subject: str, parameters: Sequence[Tensor]) -> None:
    """Check that a value is a tensor without NaN, of a parameter's type if it is floating-point."""
    if not isinstance(value, Tensor):
        raise UserError(
            f"{subject} of type {type(value).__name__}: give a tensor, as by torch.from_numpy."
        )
    if value.is_floating_point() and value.dtype not in {
        parameter.dtype for parameter in parameters
    }:
        raise UserError(
            f"{subject} of {value.dtype}, and the model's parameters are {parameters[0].dtype}: "
            "give both the same type, as by .float() of the data or of the model."
        )
    if value.is_floating_point() and value.isnan().any():
        raise UserError(f"{subject} with NaN: remove or replace it in the data.")


def _check_classes(targets: Tensor, subject: str, outputs: int | None) -> None:
    """Check that targets are class indices, below the number of outputs unless it is None."""
    if targets.dim() == 2:
        column = targets.shape[1] == 1
        one_hot = ((targets == 0) | (targets == 1)).all() and (targets.sum(1) == 1).all()
        if column or one_hot:
            raise UserError(
                f"{subject} of shape {tuple(targets.shape)}: give class indices of shape (n,), one "
                f"for each of n inputs, as by {'.squeeze(1)' if column else '.argmax(1)'}."
            )
    if targets.dtype != torch.int64:
        raise UserError(
            f"{subject} of {targets.dtype}: give class indices of torch.int64, as by .long()."
        )
    if not targets.numel():
        return
    low, high = int(targets.min()), int(targets.max())
    if outputs is not None and not 0 <= low <= high < outputs:
        raise UserError(
            f"{subject} from {low} to {high}, and a task has {outputs} outputs: number its classes "
            f"from 0 to {outputs - 1}, or correct the number of outputs."
        )
    if low < 0:
        raise UserError(f"{subject} from {low} to {high}: number its classes from 0.")


def _check_sample_batch(tasks: TaskDistribution, split: str, name: str, own: bool) -> None:
    """Check that `sample_batch`, if there is one, gives the tasks of `sample`.

    Args:
        tasks: this rank's tasks.
        split: the split of which tasks are sampled.
        name: the class that samples them.
        own: whether that is the class of the tasks, rather than of the dataset.
    """
    sample_batch = getattr(tasks, "sample_batch", None)
    if sample_batch is None:
        return
    if own or getattr(type(tasks), "sample_batch", None) is not FewShotTasks.sample_batch:
        name, many, single, argument = type(tasks).__name__, "sample_batch", "sample", "key"
    else:
        many, single, argument = "episodes", "episode", "generator"
    keys = task_keys(0, split, 0, range(2))
    for chosen in (keys, keys[1:]):
        batch = sample_batch(chosen, torch.device("cpu"))
        if batch is None:
            return
        if not isinstance(batch, Episode):
            raise UserError(
                f"{name}.{many} gives a {type(batch).__name__}: return an Episode whose tensors "
                "have a first dimension of tasks, or None."
            )
        stacked = [tensor for part in batch for tensor in part]
        for index, key in enumerate(chosen):
            sampled = [tensor for part in tasks.sample(key) for tensor in part]
            if not all(
                tensor.dtype == one.dtype
                and len(tensor) == len(chosen)
                and torch.equal(tensor[index], one)
                for tensor, one in zip(stacked, sampled, strict=True)
            ):
                raise UserError(
                    f"{name}.{many} gives other tasks than {name}.{single} for the same "
                    f"{argument}s: give one task per {argument}, each from its own {argument} "
                    "alone, with a first dimension of tasks and the same types."
                )


def _check_classes_of_support(episode: Episode, name: str) -> None:
    """Require a support example of each class, to whose features queries are compared."""
    support, query = (set(part.targets.unique().tolist()) for part in episode)
    missing = sorted(set(range(max(support | query, default=-1) + 1)) - support)
    if support and missing:  # supervised training has no support set
        raise UserError(
            f"{name} gives a task without support examples of class {missing[0]}: give at least "
            "one of each class, numbered from 0."
        )
