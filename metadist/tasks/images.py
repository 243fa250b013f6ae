"""Few-shot episodes from classes of images that are held in memory."""

from collections.abc import Mapping

import numpy as np
import torch

from metadist.errors import UserError
from metadist.tasks.episode import SPLITS, Episode, Examples

TURNS = 4
"""Rotations by 0, 90, 180 and 270 degrees."""


class ImageClasses:
    """Images by class, divided into splits; the common part of every image dataset.

    With rotations a class is a base class turned by 0, 90, 180 or 270 degrees: two turns of one
    base class are two classes (Santoro et al. 2016, arXiv 1605.06065). As in the code of MAML
    (Finn et al. 2017, arXiv 1703.03400) a task's classes come from different base classes, each
    with a turn of its own; two turns of a symmetric character would be one and the same.
    Nothing is rotated before it is drawn.

    Attributes:
        input_shape: (1, height, width) for images in one colour, else (channels, height, width).
        regression: False.
    """

    regression = False

    def __init__(
        self,
        name: str,
        images: np.ndarray,
        splits: Mapping[str, np.ndarray],
        rotations: bool = False,
        test_rotations: bool = False,
    ):
        """Hold `images`, without copying them.

        Args:
            name: what `protocol` calls the dataset.
            images: uint8 of shape (classes, examples, height, width) or (classes, examples,
                channels, height, width), 0 = paper and 255 = full ink. May be a memory map and
                is never written to.
            splits: for each of `metadist.tasks.episode.SPLITS` the indices of its base classes
                in `images`, int64 of shape (classes of the split,).
            rotations: whether turned training classes are classes of their own.
            test_rotations: the same for validation and test.

        Raises:
            ValueError: `images` is of another type or shape, or is to be rotated but not square.
        """
        if images.dtype != np.uint8 or images.ndim not in (4, 5):
            raise ValueError(
                f"images must be uint8 of shape (classes, examples, [channels,] height, width), "
                f"got {images.dtype} of shape {images.shape}"
            )
        if (rotations or test_rotations) and images.shape[-1] != images.shape[-2]:
            raise ValueError(f"only square images can be rotated, got {images.shape[-2:]}")
        self.name = name
        # A plain view: indexing np.memmap itself is slower and yields np.memmap again.
        self.images = np.asarray(images)
        self.splits = {split: np.asarray(splits[split], dtype=np.int64) for split in SPLITS}
        self.rotations = rotations
        self.test_rotations = test_rotations
        self.input_shape: tuple[int, ...] = (
            (1, *images.shape[2:]) if images.ndim == 4 else tuple(images.shape[2:])
        )

    def outputs(self, ways: int) -> int:
        """Width of the last layer of a model for tasks of `ways` classes: `ways`."""
        return ways

    def split_classes(self, split: str) -> np.ndarray:
        """A split's images, for training on all its classes at once.

        Returns:
            uint8 of shape (base classes, examples, *image shape), a copy, without rotations.
        """
        return self.images[self.splits[split]]

    def check(self, ways: int, shots: int, queries: int) -> None:
        """Raise `UserError` when a split has too few classes, or the classes too few examples."""
        for split, members in self.splits.items():
            if ways > len(members):
                raise UserError(
                    f"task.ways is {ways}, but the {split} split of {self.name} has only "
                    f"{len(members)} classes; lower task.ways or take a dataset with more classes"
                )
        examples = self.images.shape[1]
        if shots + queries > examples:
            raise UserError(
                f"task.shots + task.queries is {shots} + {queries} = {shots + queries}, but a "
                f"class of {self.name} has only {examples} examples; lower one of them"
            )

    def episode(
        self, generator: np.random.Generator, split: str, ways: int, shots: int, queries: int
    ) -> Episode:
        """One task: random classes, labelled 0 to ways - 1 in drawn order, and random examples.

        Args:
            generator: the only source of randomness; it is advanced.
            split: one of `metadist.tasks.episode.SPLITS`.
            ways: classes in the task, from as many base classes.
            shots: support examples a class.
            queries: query examples a class, none of which is in the support set.

        Returns:
            inputs float32 in [0, 1] of shape (ways * shots, *input_shape) and (ways * queries,
            *input_shape), all examples of class 0 first; targets int64 of shape (ways * shots,)
            and (ways * queries,).
        """
        members = self.splits[split]
        classes = members[generator.choice(len(members), ways, replace=False)]
        order = np.broadcast_to(np.arange(self.images.shape[1]), (ways, self.images.shape[1]))
        examples = generator.permuted(order, axis=1)[:, : shots + queries]
        pixels = self.images[classes[:, None], examples]  # (ways, shots + queries, …)
        if self.rotations if split == "train" else self.test_rotations:
            turns = generator.integers(TURNS, size=ways)
            for turn in range(1, TURNS):
                turned = turns == turn
                pixels[turned] = np.rot90(pixels[turned], turn, axes=(-2, -1))
        return Episode(
            self._examples(pixels[:, :shots], ways), self._examples(pixels[:, shots:], ways)
        )

    def protocol(self) -> dict[str, object]:
        """Name of the dataset, and whether rotations made new classes."""
        return {
            "dataset": self.name,
            "rotations": self.rotations,
            "test_rotations": self.test_rotations,
        }

    def _examples(self, pixels: np.ndarray, ways: int) -> Examples:
        """Pixels of shape (ways, n, …) as ways * n examples, class by class."""
        inputs = np.divide(pixels, 255, dtype=np.float32).reshape(-1, *self.input_shape)
        targets = torch.arange(ways).repeat_interleave(pixels.shape[1])
        return Examples(torch.from_numpy(inputs), targets)
