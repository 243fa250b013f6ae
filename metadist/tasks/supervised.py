"""Supervised training beside few-shot evaluation: groups of labelled examples, then episodes."""

from typing import Annotated

import torch
from annotated_types import Ge
from torch import Tensor

from metadist.errors import UserError
from metadist.tasks.dataset import ImageDataset
from metadist.tasks.episode import Episode, Examples, key_generator, key_split


class SupervisedTasks:
    """Ordinary classification of the training classes, judged on held-out examples and few-shot.

    A "task" of training is a group of labelled examples; a batch is several groups, which
    partitioners spread over the workers. Batch norm normalises each group by itself, so that the
    numbers do not depend on how many workers share the groups.

    - split "train": `group` examples of the training classes, as the query set; no support set.
    - split "validation": the same of examples that training never sees.
    - split "test": few-shot episodes of the test classes.

    Args:
        dataset: images in classes.
        group: examples in a group, at least two.
        held_out: examples of each training class that are kept for validation.
        ways: classes in a test episode.
        shots: support examples a class in a test episode.
        queries: query examples a class in a test episode.

    Raises:
        UserError: a dataset without images, too few examples or classes.
    """

    def __init__(
        self,
        dataset: ImageDataset,
        group: Annotated[int, Ge(2)] = 16,
        held_out: Annotated[int, Ge(1)] = 4,
        ways: Annotated[int, Ge(1)] = 5,
        shots: Annotated[int, Ge(1)] = 1,
        queries: Annotated[int, Ge(1)] = 5,
    ) -> None:
        if not isinstance(dataset, ImageDataset):
            raise UserError(
                "supervised training needs images in classes, which "
                f"{type(dataset).__name__} does not have: choose dataset=glyphs, omniglot, "
                "mini_imagenet or cifar_fs."
            )
        dataset.check(ways, shots, queries, ("test",))
        self.dataset = dataset
        self.group = group
        self.held_out = held_out
        self.ways = ways
        self.shots = shots
        self.queries = queries
        self.images = dataset.split_classes("train")
        classes, examples = self.images.shape[:2]
        if held_out >= examples:
            raise UserError(
                f"task.held_out={held_out} leaves no example of a class's {examples} to train on: "
                f"hold out {examples - 1} at most."
            )
        self.input_shape = dataset.input_shape
        self.outputs = classes
        self.regression = False

    def draw(self, key: Tensor) -> Episode:
        """The group or the episode of one key of shape (4,)."""
        split, generator = key_split(key), key_generator(key)
        if split == "test":
            return self.dataset.episode(generator, split, self.ways, self.shots, self.queries)
        classes, examples = self.images.shape[:2]
        seen = examples - self.held_out
        first, last = (0, seen) if split == "train" else (seen, examples)
        labels = generator.integers(classes, size=self.group)
        chosen = self.images[labels, generator.integers(first, last, size=self.group)]
        inputs = self.dataset.inputs(chosen, split, generator)
        group = Examples(inputs, torch.from_numpy(labels))
        nothing = Examples(group.inputs[:0], group.targets[:0])
        return Episode(nothing, group)

    def protocol(self) -> dict[str, object]:
        """Of the test episodes, and of the groups, whose images are never turned."""
        return {
            "ways": self.ways,
            "shots": self.shots,
            "queries": self.queries,
            "group": self.group,
            "held_out": self.held_out,
            **self.dataset.protocol(),
            "rotations": False,
        }
