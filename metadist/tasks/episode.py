"""The data of one task: its key, its episode and the protocol of what draws it."""

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
    """One few-shot task: what the learner adapts on, and what it is judged on.

    Attributes:
        support: `ways * shots` examples.
        query: `ways * queries` examples, none of which is in the support set.
    """

    support: Examples
    query: Examples


def task_keys(seed: int, split: str, iteration: int, indices: range) -> Tensor:
    """The keys of the tasks `indices` of one iteration.

    A task's random numbers follow from its key alone, so every worker, whatever its rank and
    however many there are, draws the same task from the same key.

    Args:
        seed: the run's seed, not negative.
        split: one of `SPLITS`.
        iteration: the training iteration; for evaluation lists, 0.
        indices: the tasks' places within the iteration.

    Returns:
        int64 of shape (len(indices), 4), a row `(seed, split, iteration, index)` a task. Being a
        tensor, it is split by the partitioners as any batch is.
    """
    split_number = SPLITS.index(split)
    return torch.tensor(
        [(seed, split_number, iteration, index) for index in indices], dtype=torch.int64
    ).reshape(len(indices), 4)


def key_generator(key: Tensor) -> np.random.Generator:
    """The random generator of one task.

    Args:
        key: int64 of shape (4,), a row of `task_keys`.
    """
    return np.random.default_rng(key.tolist())


def key_split(key: Tensor) -> str:
    """The split that a key of shape (4,) draws from."""
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


class TaskDistribution(Protocol):
    """What tasks come from: a dataset under a protocol (ways, shots, queries)."""

    input_shape: tuple[int, ...]
    """Shape of one input, without a batch dimension."""

    outputs: int
    """Width of the model's last layer: ways for classification, target width for regression."""

    regression: bool
    """Whether targets are real numbers (judged by MSE) rather than classes (accuracy)."""

    def draw(self, key: Tensor) -> Episode:
        """The episode of one key of shape (4,). Equal keys give equal episodes, bit for bit."""

    def protocol(self) -> dict[str, object]:
        """What must be equal for two results to be comparable: ways, shots, rotations, …"""
