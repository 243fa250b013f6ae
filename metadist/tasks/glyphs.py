"""Handwriting-like characters that the program draws itself: nothing to download."""

from typing import Annotated

import numpy as np
import torch
from annotated_types import Ge, Interval

from metadist.errors import UserError
from metadist.tasks.episode import SPLITS
from metadist.tasks.images import ImageClasses
from metadist.tasks.strokes import Writing, write
from metadist.tasks.transforms import Augment, Normalize

HALF_SIDE = 0.37
"""Half the larger side of a character as its class defines it, as a share of the image."""

_PENS = 12
_PEN_WIDTHS = (0.55, 0.72)
"""Standard deviations in pixels of the thinnest and the thickest pen, at 28 pixels."""

_STEPS = 8
"""Pen positions are rounded to 1/8 of a pixel, …"""
_LENGTH_STEPS = 16
"""… the lengths they stand for to 1/16, …"""
_LEVELS = 63
"""… and the ink around a position to 1/63, for the reason given at `_ink`."""
_MARGIN = 4
_SATURATION = 1.35
_CHUNK = 25
"""Classes drawn at once: the arrays between stay small enough for the processor's cache."""


class Glyphs(ImageClasses):
    """Characters of two to four random strokes, each written by hand many times.

    A class is an invented character, an example one writing of it: strokes displaced and bent,
    the whole slanted, stretched, turned by some ten degrees and shifted by a pixel or so, with a
    thinner or thicker pen. On 5-way 1-shot tasks the nearest neighbour in pixels reaches 59%.

    Everything follows from (seed, split, index of the class): the splits share no class, and a
    class stays the same when the number of classes or examples changes. The images are equal bit
    for bit whatever the number of threads. Drawing the default set takes about a second.

    Attributes:
        input_shape: (1, size, size).
        regression: False.
    """

    def __init__(
        self,
        seed: Annotated[int, Ge(0)] = 0,
        train_classes: Annotated[int, Ge(1)] = 1000,
        validation_classes: Annotated[int, Ge(1)] = 100,
        test_classes: Annotated[int, Ge(1)] = 400,
        examples: Annotated[int, Ge(2)] = 20,
        size: Annotated[int, Interval(ge=8, le=256)] = 28,
        normalize: Normalize | None = None,
        augment: Augment | None = None,
    ):
        """Draw all images.

        Args:
            seed: another seed invents other characters.
            train_classes: characters for training.
            validation_classes: characters for validation.
            test_classes: characters for test.
            examples: writings of each character, at least 2.
            size: height and width of an image in pixels, 8 to 256.
            normalize: what is done to the pixels of every image; None for nothing.
            augment: what is done to training images before; None for nothing.

        Raises:
            UserError: an argument is out of its bounds.
        """
        counts = (train_classes, validation_classes, test_classes)
        bounds = {
            "seed": (seed, 0),
            **{f"{split}_classes": (n, 1) for split, n in zip(SPLITS, counts, strict=True)},
            "examples": (examples, 2),
            "size": (size, 8),
        }
        for name, (value, least) in bounds.items():
            if value < least:
                raise UserError(f"dataset.{name} must be at least {least}, got {value}")
        if size > 256:
            raise UserError(f"dataset.size must be at most 256, got {size}")
        keys = [(seed, number, index) for number, n in enumerate(counts) for index in range(n)]
        limits = np.cumsum(counts)[:-1]
        members = np.split(np.arange(len(keys)), limits)
        super().__init__(
            "glyphs",
            draw_glyphs(keys, examples, size),
            dict(zip(SPLITS, members, strict=True)),
            normalize=normalize,
            augment=augment,
        )
        self.seed = seed

    def protocol(self) -> dict[str, object]:
        """Name of the dataset, seed of its characters, their numbers and the image size."""
        return {
            **super().protocol(),
            "dataset_seed": self.seed,
            "classes": {split: len(members) for split, members in self.splits.items()},
            "examples": self.images.shape[1],
            "image_size": self.images.shape[-1],
        }


def draw_glyphs(keys: list[tuple[int, ...]], examples: int, size: int) -> np.ndarray:
    """Images of one character a key.

    Args:
        keys: what each character follows from, numbers that are not negative.
        examples: writings of each character.
        size: height and width in pixels.

    Returns:
        uint8 of shape (len(keys), examples, size, size), 255 = full ink.
    """
    images = np.empty((len(keys), examples, size, size), dtype=np.uint8)
    profiles, gains = _pens(size)
    for start in range(0, len(keys), _CHUNK):
        writing = write(keys[start : start + _CHUNK], examples)
        images[start : start + _CHUNK] = _ink(writing, profiles, gains, size)
    return images


def _pens(size: int) -> tuple[np.ndarray, np.ndarray]:
    """The ink that each pen leaves along one axis, and the factor to a pixel's value.

    Returns:
        Whole numbers 0 to 63 as float32 of shape (pens, places, size), places being 1/8 of a pixel
        apart from `_MARGIN` pixels before the image to `_MARGIN` behind; float32 of shape (pens,).
    """
    widths = np.linspace(*_PEN_WIDTHS, _PENS) * size / 28
    places = np.arange(-_MARGIN * _STEPS, (size + _MARGIN) * _STEPS + 1) / _STEPS
    distances = places[:, None] - np.arange(size)
    profiles = np.exp(-0.5 * (distances / widths[:, None, None]) ** 2)
    # In the middle of a straight stroke the sum is the integral of the profile along it.
    middle = _LEVELS**2 * _LENGTH_STEPS * widths * np.sqrt(2 * np.pi)
    gains = 255 * _SATURATION / middle
    return np.rint(_LEVELS * profiles).astype(np.float32), gains.astype(np.float32)


def _ink(writing: Writing, profiles: np.ndarray, gains: np.ndarray, size: int) -> np.ndarray:
    """What the pen leaves on paper: uint8 (classes, examples, size, size).

    The ink around each pen position is a Gaussian, a product of one profile down and one across,
    so that an image is one matrix product over its pen positions. Both factors are whole numbers,
    small enough for exact sums in float32: the result depends neither on the order of summation
    nor on the number of threads, and every worker holds the same images.
    """
    count = writing.thickness.size
    pixels = writing.positions.reshape(count, -1, 2) * (HALF_SIDE * size) + (size - 1) / 2
    places = np.rint((pixels + _MARGIN) * _STEPS).astype(np.int64)
    np.clip(places, 0, profiles.shape[1] - 1, out=places)
    lengths = np.rint(writing.lengths.reshape(count, -1, 1) * (HALF_SIDE * size * _LENGTH_STEPS))
    pens = np.minimum(writing.thickness.reshape(count) * _PENS, _PENS - 1).astype(np.int64)
    across = torch.from_numpy(profiles[pens[:, None], places[..., 0]])
    down = torch.from_numpy(profiles[pens[:, None], places[..., 1]] * lengths.astype(np.float32))
    ink = torch.bmm(down.transpose(1, 2), across).numpy()
    ink *= gains[pens, None, None]
    np.minimum(ink, 255, out=ink)
    return ink.astype(np.uint8).reshape(*writing.thickness.shape, size, size)
