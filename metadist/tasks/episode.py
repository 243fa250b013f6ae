"""The data of one task: its key, its episode, and the interface of task distributions."""

from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

SPLITS = ("train", "validation", "test")


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
    """One few-shot task: what the learner adapts on, and what it is evaluated on.

    Attributes:
        support: `ways * shots` examples.
        query: `ways * queries` examples, none of which is in the support set.
    """

    support: Examples
    query: Examples


class EpisodeDescription(NamedTuple):
    """Which classes and images are in an episode, for people.

    Attributes:
        classes: names of the classes, in the order of their labels.
        query_images: for each query the number of its image in its class, from 0.
    """

    classes: list[str]
    query_images: list[int]


def task_keys(seed: int, split: str, iteration: int, indices: range) -> Tensor:
    """The keys of the tasks `indices` of one iteration.

    A task's random numbers depend on its key alone: equal keys give the same task on every worker.

    Args:
        seed: the run's seed, not negative.
        split: one of `SPLITS`.
        iteration: the training iteration; for evaluation lists, 0.
        indices: the tasks' indices within the iteration.

    Returns:
        int64 of shape (len(indices), 4), a row `(seed, split, iteration, index)` per task; a
        tensor, so that partitioners split it like any batch.
    """
    keys = np.empty((len(indices), 4), np.int64)
    keys[:, :3] = seed, SPLITS.index(split), iteration
    keys[:, 3] = indices
    return torch.from_numpy(keys)


def key_generator(key: Tensor) -> np.random.Generator:
    """The random generator of one task.

    Args:
        key: int64 of shape (4,), a row of `task_keys`.
    """
    return np.random.default_rng(key.tolist())


def key_split(key: Tensor) -> str:
    """The split of the task of a key of shape (4,)."""
    return SPLITS[int(key[1])]


def stack_episodes(episodes: list[Episode]) -> Episode:
    """Episodes of equal shapes as one, every tensor with a leading task dimension."""
    return Episode(
        *(
            Examples(
                torch.stack([getattr(e, part).inputs for e in episodes]),
                torch.stack([getattr(e, part).targets for e in episodes]),
            )
            for part in Episode._fields
        )
    )


def select_episodes(episodes: Episode, index: int | slice) -> Episode:
    """One of several stacked episodes, or some.

    Args:
        episodes: every tensor with a leading task dimension, which an integer removes.
        index: of the episodes.
    """
    return Episode(*(Examples(part.inputs[index], part.targets[index]) for part in episodes))


class TaskShape(Protocol):
    """What a model is built for: the part of a task distribution that needs no data."""

    input_shape: tuple[int, ...]
    """Shape of one input, without a batch dimension."""

    outputs: int
    """Width of the model's last layer: ways for classification, target width for regression."""

    regression: bool
    """Whether targets are real numbers (evaluated by MSE) rather than classes (accuracy)."""


class TaskDistribution(TaskShape, Protocol):
    """A distribution of tasks: a dataset with a number of ways, shots and queries.

    A distribution that samples many tasks together faster than one by one has a method
    `sample_batch(keys, device)` too. It returns the tasks of keys of shape (tasks, 4), every tensor
    with a first dimension of tasks, the same bit for bit as `sample` gives them, or None for keys
    whose tasks it cannot sample together.
    """

    def sample(self, key: Tensor) -> Episode:
        """Sample the task of a key of shape (4,). Equal keys give equal episodes, bit for bit."""

    def protocol(self) -> dict[str, object]:
        """What must be equal for two results to be comparable: ways, shots, rotations, …"""
