"""What is done to images between the dataset and the model: augmentation and normalisation."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Annotated

import numpy as np
import torch
from annotated_types import Ge, Interval
from torch import Tensor

from metadist.errors import UserError

_GREY = np.array([0.2989, 0.587, 0.114], dtype=np.float32)
"""Brightness of red, green and blue (ITU-R BT.601), rounded as in torchvision."""

Share = Annotated[float, Interval(ge=0, le=1)]


@dataclass(frozen=True)
class Normalize:
    """`(pixel - mean) / std`, channel by channel, of pixels in [0, 1].

    Args:
        mean: one number a channel, or one for all.
        std: the same; positive.

    Raises:
        UserError: a `std` that is not positive.
    """

    mean: Sequence[float] = (0.0,)
    std: Sequence[float] = (1.0,)

    def __post_init__(self) -> None:
        if not all(value > 0 for value in self.std):
            raise UserError(f"dataset.normalize.std={list(self.std)} must be above 0")

    @cached_property
    def identity(self) -> bool:
        """Whether it changes nothing."""
        return not any(self.mean) and all(value == 1 for value in self.std)

    def check(self, channels: int) -> None:
        """Raise `UserError` when the numbers do not fit images of so many channels."""
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) not in (1, channels):
                raise UserError(
                    f"dataset.normalize.{name} has {len(values)} numbers: give 1, or {channels}, "
                    "one a channel"
                )

    def __call__(self, inputs: Tensor) -> Tensor:
        """Of float32 images (n, channels, height, width), changed in place."""
        mean, std = (
            torch.tensor(values, dtype=torch.float32)[:, None, None]
            for values in (self.mean, self.std)
        )
        return inputs.sub_(mean).div_(std)

    def protocol(self) -> dict[str, object]:
        """The numbers, as plain containers."""
        return {"mean": list(self.mean), "std": list(self.std)}


@dataclass(frozen=True)
class Augment:
    """Random changes of each training image by itself; everything is off by default.

    In this order: a crop of the original size from the image with a border of black pixels; a
    mirror image; another brightness, contrast and saturation, each by a factor uniform in
    [1 - x, 1 + x]. The factors mean what they do in `torchvision.transforms.v2.ColorJitter`,
    whose order is random. Random numbers come from the task's own generator, so a task is the
    same on every rank.

    Args:
        crop_padding: width of the border in pixels.
        flip: how likely an image is mirrored, left to right.
        brightness: x for the brightness.
        contrast: x for the contrast.
        saturation: x for the saturation; nothing in images of one channel.
    """

    crop_padding: Annotated[int, Ge(0)] = 0
    flip: Share = 0.0
    brightness: Share = 0.0
    contrast: Share = 0.0
    saturation: Share = 0.0

    @cached_property
    def identity(self) -> bool:
        """Whether it changes nothing."""
        return not any(asdict(self).values())

    def __call__(self, inputs: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """Of float32 images (n, channels, height, width) in [0, 1]; the result is in [0, 1] too.

        Args:
            inputs: may be changed in place.
            generator: the only source of randomness; it is advanced.
        """
        count = len(inputs)
        if self.crop_padding:
            inputs = self._crop(
                inputs, generator.integers(2 * self.crop_padding + 1, size=(count, 2))
            )
        if self.flip:
            mirrored = generator.random(count) < self.flip
            inputs[mirrored] = inputs[mirrored, ..., ::-1]
        for strength, anchor in (
            (self.brightness, lambda images: np.float32(0)),
            (self.contrast, lambda images: _grey(images).mean(axis=(1, 2, 3), keepdims=True)),
            (self.saturation, _grey),
        ):
            if strength:
                factors = generator.uniform(1 - strength, 1 + strength, size=(count, 1, 1, 1))
                base = anchor(inputs)
                inputs = base + factors.astype(np.float32) * (inputs - base)
                np.clip(inputs, 0, 1, out=inputs)
        return inputs

    def _crop(self, inputs: np.ndarray, corners: np.ndarray) -> np.ndarray:
        height, width = inputs.shape[2:]
        border = (self.crop_padding, self.crop_padding)
        padded = np.pad(inputs, ((0, 0), (0, 0), border, border))
        for image, source, (top, left) in zip(inputs, padded, corners, strict=True):
            image[:] = source[:, top : top + height, left : left + width]
        return inputs

    def protocol(self) -> dict[str, object]:
        """What is switched on."""
        return {name: value for name, value in asdict(self).items() if value}


def _grey(images: np.ndarray) -> np.ndarray:
    """Brightness of (n, channels, height, width), with one channel."""
    if images.shape[1] != len(_GREY):
        return images
    return np.tensordot(_GREY, images, axes=(0, 1))[:, None]
