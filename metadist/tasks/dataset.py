"""What a dataset offers to the tasks drawn from it."""

from typing import Protocol, runtime_checkable

import numpy as np

from metadist.tasks.episode import Episode


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

    def check(self, ways: int, shots: int, queries: int) -> None:
        """Raise `UserError` when the dataset has too few classes or examples for such tasks."""

    def protocol(self) -> dict[str, object]:
        """What must be equal for two results to be comparable: name, split seed, rotations, …"""


@runtime_checkable
class ImageDataset(TaskDataset, Protocol):
    """A dataset of images, which supervised training can read class by class as well."""

    def split_classes(self, split: str) -> np.ndarray:
        """A split's images: uint8 of shape (classes, examples, *image shape), as drawn."""
