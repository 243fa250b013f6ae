"""Supervised training with few-shot evaluation: micro-batches, then episodes."""

import logging
from collections.abc import Sequence
from typing import Annotated

import numpy as np
import torch
from annotated_types import Ge
from torch import Tensor

from metadist.errors import UserError
from metadist.tasks.dataset import ImageDataset, optional_method, with_dataset_protocol
from metadist.tasks.episode import (
    SPLITS,
    Episode,
    EpisodeDescription,
    Examples,
    key_generator,
    key_split,
)

_log = logging.getLogger(__name__)


class SupervisedTasks:
    """Classification of the training classes; validation on held-out examples; few-shot test.

    A training "task" is a micro-batch of labeled examples; partitioners split the micro-batches of
    a batch among the workers. Batch norm uses the statistics of each micro-batch, so that the
    numbers do not depend on the number of workers.

    - split "train": `micro_batch_size` examples of the training classes as the query set, each of
      a class drawn uniformly; the support set is empty. If the dataset leaves out small classes,
      the classes with at most `held_out` examples are left out.
    - split "validation": the same with the held-out examples.
    - split "test": few-shot episodes of the test classes.

    Attributes:
        split_descriptions: a readable description of what validation and test accuracy measure.

    Args:
        dataset: a dataset of images in classes.
        micro_batch_size: examples in a micro-batch, at least 2.
        held_out: examples of each training class that are held out for validation.
        ways: classes in a test episode.
        shots: support examples per class in a test episode.
        queries: query examples per class in a test episode.
        sampled_splits: the splits that tasks are sampled from. With "test" alone, the training
            classes may be of any size.

    Raises:
        UserError: the dataset has no images, or too few examples or classes.
    """

    def __init__(
        self,
        dataset: ImageDataset,
        micro_batch_size: Annotated[int, Ge(2)] = 16,
        held_out: Annotated[int, Ge(1)] = 4,
        ways: Annotated[int, Ge(2)] = 5,
        shots: Annotated[int, Ge(1)] = 1,
        queries: Annotated[int, Ge(1)] = 5,
        sampled_splits: Sequence[str] = SPLITS,
    ) -> None:
        if not isinstance(dataset, ImageDataset):
            raise UserError(
                "supervised training needs images in classes, which "
                f"{type(dataset).__name__} does not have: choose a dataset of images, such as "
                "dataset=omniglot or dataset=folder."
            )
        dataset.check(ways, shots, queries, ("test",))
        self.dataset = dataset
        self.micro_batch_size = micro_batch_size
        self.held_out = held_out
        self.ways = ways
        self.shots = shots
        self.queries = queries
        self.sampled_splits = tuple(sampled_splits)
        classes = dataset.split_classes("train")
        sizes = [len(class_images) for class_images in classes]
        trains = self.sampled_splits != ("test",)
        if trains and not sizes:
            raise UserError(
                "supervised training needs classes in the dataset's training split, which is "
                "empty: give it classes, or choose another dataset."
            )
        # If small classes are left out, one large class is enough.
        smallest = max if getattr(dataset, "skip_small_classes", False) else min
        if trains and held_out >= (needed := smallest(sizes)):
            advice = f"hold out {needed - 1} at most"
            if needed == 1:
                remove = getattr(dataset, "without_small_classes", "remove these classes")
                advice = f"add images, or {remove}"
            raise UserError(
                f"task.held_out={held_out} leaves no example of a class's {needed} to train on: "
                f"{advice}."
            )
        large = [class_images for class_images in classes if len(class_images) > held_out]
        self.images = large or classes
        if left_out := len(classes) - len(self.images):
            _log.info(
                "%d training classes with %d examples or fewer are left out", left_out, held_out
            )
        self.class_sizes = np.array([len(class_images) for class_images in self.images])
        self.input_shape = dataset.input_shape
        self.outputs = len(self.images)
        self.regression = False
        self.split_descriptions = {
            "validation": f"classification of held-out examples, {self.outputs} training classes",
            "test": f"few-shot: {ways}-way {shots}-shot tasks of unseen classes",
        }

    def sample(self, key: Tensor) -> Episode:
        """Sample the micro-batch or the episode of a key of shape (4,)."""
        split, generator = key_split(key), key_generator(key)
        if split == "test":
            return self.dataset.episode(generator, split, self.ways, self.shots, self.queries)
        labels = generator.integers(len(self.images), size=self.micro_batch_size)
        examples = self.class_sizes[labels]
        training = examples - self.held_out
        first, last = (0, training) if split == "train" else (training, examples)
        indices = generator.integers(first, last)
        pixels = [self.images[label][index] for label, index in zip(labels, indices, strict=True)]
        inputs = self.dataset.inputs(np.stack(pixels), split, generator)
        batch = Examples(inputs, torch.from_numpy(labels))
        return Episode(support=Examples(batch.inputs[:0], batch.targets[:0]), query=batch)

    def describe(self, key: Tensor) -> EpisodeDescription | None:
        """The classes and query images of a test task; None for a dataset without `describe`."""
        describe, split = optional_method(self.dataset, "describe", "episode"), key_split(key)
        if describe is None or split != "test":
            return None
        return describe(key_generator(key), split, self.ways, self.shots, self.queries)

    def protocol(self) -> dict[str, object]:
        """The sizes of test episodes and micro-batches, and the dataset's protocol.

        Images of micro-batches are never rotated, so `rotations` is False.

        Raises:
            UserError: the dataset's protocol has a key of one of these sizes.
        """
        counts = {
            "ways": self.ways,
            "shots": self.shots,
            "queries": self.queries,
            "micro_batch_size": self.micro_batch_size,
            "held_out": self.held_out,
        }
        return {**with_dataset_protocol(counts, self.dataset), "rotations": False}
