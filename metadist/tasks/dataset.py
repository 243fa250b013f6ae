"""What a dataset offers to the tasks drawn from it."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from metadist.tasks.episode import SPLITS, Episode


@runtime_checkable
class TaskDataset(Protocol):
    """A source of episodes: it knows its classes and draws from them, ways and shots given.

    Which task is drawn follows from the generator alone, so every process that holds the same
    dataset draws the same episode from an equal generator.
    """

    input_shape: tuple[int, ...]
    """Shape of one input, without a batch dimension."""

    regression: bool
    """Whether targets are real numbers rather than classes."""

    def outputs(self, ways: int) -> int:
        """Width of the last layer of a model for tasks of `ways` classes."""

    def episode(
        self, generator: np.random.Generator, split: str, ways: int, shots: int, queries: int
    ) -> Episode:
        """One task of a split.

        Args:
            generator: the only source of randomness; it is advanced.
            split: one of `metadist.tasks.episode.SPLITS`.
            ways: classes in the task.
            shots: support examples a class.
            queries: query examples a class, none of which is in the support set.
        """

    def check(
        self,
        ways: int,
        shots: int,
        queries: int,
        splits: Sequence[str] = SPLITS,
        keys: str = "task.",
    ) -> None:
        """Raise `UserError` when some splits have too few classes or examples for such tasks.

        Args:
            ways: classes in a task.
            shots: support examples a class.
            queries: query examples a class.
            splits: which splits shall have such tasks.
            keys: what the counts' names begin with in the configuration, for the message.
        """

    def protocol(self) -> dict[str, object]:
        """What must be equal for two results to be comparable: name, split seed, rotations, …"""


@runtime_checkable
class ImageDataset(TaskDataset, Protocol):
    """A dataset of images, which supervised training can read class by class as well."""

    def split_classes(self, split: str) -> np.ndarray:
        """A split's images: uint8 of shape (classes, examples, *image shape); not to be changed."""

    def inputs(self, pixels: np.ndarray, split: str, generator: np.random.Generator) -> Tensor:
        """Some of them as a model takes them: float32 (n, *input_shape), augmented in training.

        Args:
            pixels: uint8 of shape (…, *image shape).
            split: the split that they are of.
            generator: the only source of randomness; it is advanced.
        """
