"""The interfaces of datasets that tasks are sampled from."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from metadist.errors import UserError
from metadist.tasks.episode import SPLITS, Episode


@runtime_checkable
class TaskDataset(Protocol):
    """A dataset that samples episodes with a number of ways, shots and queries.

    The sampled task depends on the generator alone: equal generators give equal episodes in every
    process.

    Optional members; a subclass that overrides `episode` (or `ImageClasses.inputs`) without
    `episodes` is sampled by `episode`, and one that overrides it without `describe` has none:

    - `episodes(device, generators, split, ways, shots, queries)`: one episode per generator of an
      iterable, stacked along a leading task dimension, each bit for bit that of `episode`, on the
      CPU or on the device of the computation; or None. With it `looks_ahead`, True if it never
      gives None and tasks of later iterations may be sampled in advance; a subclass sets it again.
    - `describe(generator, split, ways, shots, queries)`: the `EpisodeDescription` of the task that
      `episode` samples with the generator, or None.
    - `skip_small_classes`: whether classes with too few examples are left out; with it
      `without_small_classes`, which says in messages how to leave them out.
    """

    input_shape: tuple[int, ...]
    """The shape of one input, without a batch dimension."""

    regression: bool
    """Whether targets are real numbers rather than classes."""

    def outputs(self, ways: int) -> int:
        """The width of the last layer of a model for tasks of `ways` classes."""

    def episode(
        self, generator: np.random.Generator, split: str, ways: int, shots: int, queries: int
    ) -> Episode:
        """Sample a task of a split.

        Args:
            generator: the only source of randomness; it is advanced.
            split: one of `metadist.tasks.episode.SPLITS`.
            ways: classes in the task.
            shots: support examples per class.
            queries: query examples per class, none of which is in the support set.
        """

    def check(
        self,
        ways: int,
        shots: int,
        queries: int,
        splits: Sequence[str] = SPLITS,
        key_prefix: str = "task.",
    ) -> None:
        """Raise `UserError` if a split has too few classes or examples for such tasks.

        Args:
            ways: classes in a task.
            shots: support examples per class.
            queries: query examples per class.
            splits: the splits to check.
            key_prefix: the prefix of the counts' configuration keys, for the error message.
        """

    def protocol(self) -> dict[str, object]:
        """The properties that comparable results have in common: name, split seed, rotations, …"""


def with_dataset_protocol(counts: Mapping[str, int], dataset: TaskDataset) -> dict[str, object]:
    """The protocol of tasks: their counts, and the protocol of the dataset they are sampled from.

    Args:
        counts: the keys and values of the task distribution.
        dataset: the dataset.

    Raises:
        UserError: the dataset's protocol has one of the keys.
    """
    protocol = dataset.protocol()
    if taken := sorted(counts.keys() & protocol.keys()):
        raise UserError(
            f'{type(dataset).__name__}.protocol returned the key "{taken[0]}", which has the value '
            f"of task.{taken[0]}: give it another name."
        )
    return {**counts, **protocol}


def optional_method(dataset: object, name: str, *replaced: str) -> Callable[..., Any] | None:
    """An optional method of a dataset that is used in place of others.

    Args:
        dataset: the dataset.
        name: the name of the method.
        replaced: the names of the methods that it is used in place of.

    Returns:
        The method; None if there is none, or if a subclass overrides one of the others but inherits
        this method, which fits the inherited ones.
    """
    for base in type(dataset).__mro__:
        if name in vars(base):
            break
        if not vars(base).keys().isdisjoint(replaced):
            return None
    return getattr(dataset, name, None)


@runtime_checkable
class ImageDataset(TaskDataset, Protocol):
    """A dataset of images, which supervised training can also read class by class."""

    def split_classes(self, split: str) -> Sequence[np.ndarray]:
        """The images of each class of a split, not to be written to.

        Each is uint8 of shape (examples, *image shape); classes may have unequal numbers.
        """

    def inputs(self, pixels: np.ndarray, split: str, generator: np.random.Generator) -> Tensor:
        """Convert images to model inputs: float32 (n, *input_shape), augmented in training.

        Args:
            pixels: uint8 of shape (…, *image shape).
            split: the split of the images.
            generator: the only source of randomness; it is advanced.
        """
