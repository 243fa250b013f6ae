"""The data of one task: its key, its episode, and the interface of task distributions."""

from collections.abc import Iterable
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from metadist.errors import UserError

SPLITS: tuple[str, str, str] = ("train", "validation", "test")


class Examples(NamedTuple):
    """Inputs and their targets.

    Attributes:
        inputs: float32, shape (n, *input_shape), or (tasks, n, *input_shape) when stacked.
        targets: int64 class indices of shape (n,), or float32 of shape (n, outputs) for
            regression; with a leading task dimension when stacked.
    """

    inputs: Tensor
    targets: Tensor


class Episode(NamedTuple):
    """One few-shot task: the examples to adapt on, and the examples to evaluate on.

    Attributes:
        support: `ways * shots` examples.
        query: `ways * queries` examples, none of which is in the support set.
    """

    support: Examples
    query: Examples

    @property
    def shapes(self) -> list[torch.Size]:
        """The shapes of the four tensors."""
        return [tensor.shape for part in self for tensor in part]


class EpisodeDescription(NamedTuple):
    """A readable description of the classes and images in an episode.

    Attributes:
        classes: the names of the classes, in the order of their labels.
        query_images: the index of each query image within its class, counted from 0.
    """

    classes: list[str]
    query_images: list[int]


def task_keys(seed: int, split: str, iteration: int, indices: range) -> Tensor:
    """The keys of some tasks of one iteration.

    A task's random numbers depend on its key alone: equal keys give the same task on every worker.

    Args:
        seed: the run's seed, or `trainer.eval_seed` for evaluation tasks; not negative.
        split: one of `SPLITS`.
        iteration: the training iteration; 0 for evaluation tasks.
        indices: the tasks' indices within the iteration.

    Returns:
        int64 of shape (len(indices), 4), one row `(seed, split, iteration, index)` per task. The
        keys are a tensor, so that partitioners split them like any batch.

    Raises:
        UserError: there is no such split.
    """
    if split not in SPLITS:
        raise UserError(f"there is no split {split!r}: choose one of {', '.join(SPLITS)}.")
    keys = np.empty((len(indices), 4), np.int64)
    keys[:, 0], keys[:, 1], keys[:, 2] = seed, SPLITS.index(split), iteration
    keys[:, 3] = np.arange(indices.start, indices.stop, indices.step)
    return torch.from_numpy(keys)


def key_generator(key: Tensor) -> np.random.Generator:
    """The random generator of one task.

    Args:
        key: int64 of shape (4,), a row of `task_keys`.
    """
    return np.random.default_rng(key.tolist())


def key_split(key: Tensor) -> str:
    """The split that a task belongs to, from its key of shape (4,)."""
    return SPLITS[int(key[1])]


def stack_episodes(episodes: list[Episode]) -> Episode:
    """Stack episodes of equal shapes: every tensor gets a leading task dimension."""
    parts = zip(*episodes, strict=True)  # all support sets, then all query sets
    return Episode(*(Examples(*map(torch.stack, zip(*part, strict=True))) for part in parts))


def select_episodes(episodes: Episode, index: int | slice) -> Episode:
    """Select one or several of stacked episodes.

    Args:
        episodes: stacked episodes; every tensor has a leading task dimension.
        index: an integer, which removes the task dimension, or a slice, which keeps it.
    """
    return Episode(*(Examples(part.inputs[index], part.targets[index]) for part in episodes))


class TaskShape(Protocol):
    """The shapes that a model is built for; known without loading any data."""

    input_shape: tuple[int, ...]
    """The shape of one input, without a batch dimension."""

    outputs: int
    """The width of the model's last layer: ways for classification, target width for regression."""

    regression: bool
    """Whether targets are real numbers (evaluated by MSE) rather than classes (accuracy)."""


class TaskDistribution(TaskShape, Protocol):
    """A distribution of tasks: a dataset with a number of ways, shots and queries.

    Optional members:

    - `sample_batch(keys, device)`, if many tasks are sampled faster at once: for keys of shape
      (tasks, 4), of one split and one or several iterations, the episodes of `sample`, bit for bit,
      stacked along a leading task dimension; or None if it cannot sample these tasks at once.
    - `looks_ahead`: True if `sample_batch` may sample training tasks of later iterations in
      advance, since the distribution does not change in training.
    - `describe(key)`: the `EpisodeDescription` of a task of classification, or None, for
      `test_predictions.jsonl` and `report.html`.
    - `split_descriptions`: a dict of what the tasks of a split are, such as
      `{"validation": "held-out examples"}`, for the console and the plots.
    - `sampled_splits`: the splits that tasks are sampled from, if these are not all of `SPLITS`.
    - `micro_batch_size`: the number of examples of a training task, if they are counted as samples
      per second.
    """

    def sample(self, key: Tensor) -> Episode:
        """Sample the task of a key of shape (4,). Equal keys give equal episodes, bit for bit."""

    def protocol(self) -> dict[str, object]:
        """The properties that comparable results have in common: ways, shots, rotations, …"""


TASK_MEMBERS = ("input_shape", "outputs", "regression", "sample", "protocol")
"""The members of `TaskDistribution`."""


def require_members(value: object, kind: str, names: Iterable[str], protocol: str) -> None:
    """Check that an object has the members of a protocol.

    Args:
        value: the object.
        kind: what the object is, for the message.
        names: the names of the members.
        protocol: the protocol's name in `metadist.tasks`.

    Raises:
        UserError: the object lacks a member.
    """
    if missing := [name for name in names if not hasattr(value, name)]:
        raise UserError(
            f"the {kind} {type(value).__name__} has no {', '.join(missing)}: see "
            f"metadist.tasks.{protocol} for what a {kind} has."
        )
