"""Transforms of images between the dataset and the model: augmentation and normalization."""

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Annotated

import numpy as np
import torch
from annotated_types import Ge, Interval
from torch import Tensor

from metadist.errors import UserError, first_line, user_frame
from metadist.tasks.random_state import random_state

_GREY_WEIGHTS = np.array([0.2989, 0.587, 0.114], dtype=np.float32)
"""Luminance of red, green and blue (ITU-R BT.601), rounded as in torchvision."""

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")

Fraction = Annotated[float, Interval(ge=0, le=1)]

ImageTransform = Callable[[Tensor], Tensor]
"""Maps an image, float32 (channels, height, width) in [0, 1], to an image of the same shape."""


@dataclass(frozen=True)
class Normalize:
    """`(pixel - mean) / std`, channel by channel, of pixels in [0, 1].

    Args:
        mean: a list of one number per channel, or of one number for all channels.
        std: the same, of positive numbers.

    Raises:
        UserError: `mean` or `std` is no list, or a `std` is not positive.
    """

    mean: Sequence[float] = (0.0,)
    std: Sequence[float] = (1.0,)

    def __post_init__(self) -> None:
        for name in ("mean", "std"):
            if not isinstance(value := getattr(self, name), Iterable):
                raise UserError(f"{name}={value} is no list: give a number per channel, or [x].")
        if not all(value > 0 for value in self.std):
            raise UserError(f"dataset.normalize.std={list(self.std)} must be above 0.")

    @cached_property
    def is_identity(self) -> bool:
        """Whether the transform changes nothing."""
        return not any(self.mean) and all(value == 1 for value in self.std)

    def check(self, channels: int) -> None:
        """Raise `UserError` if the numbers do not fit the number of channels."""
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) not in (1, channels):
                raise UserError(
                    f"dataset.normalize.{name} has {len(values)} numbers: give 1, or {channels}, "
                    "one per channel."
                )

    def __call__(self, inputs: Tensor) -> Tensor:
        """Normalize float32 images (n, channels, height, width) in place."""
        mean, std = (
            torch.tensor(values, dtype=torch.float32, device=inputs.device)[:, None, None]
            for values in (self.mean, self.std)
        )
        return inputs.sub_(mean).div_(std)

    def protocol(self) -> dict[str, object]:
        """Mean and standard deviation, as lists."""
        return {"mean": list(self.mean), "std": list(self.std)}


@dataclass(frozen=True)
class Augment:
    """Random augmentation of each training image; everything is off by default.

    In this order: a random crop of the original size from the zero-padded image; a horizontal
    flip; brightness, contrast and saturation, each by a factor uniform in [1 - x, 1 + x] with the
    meaning of `torchvision.transforms.v2.ColorJitter` (whose order is random). The random numbers
    come from the task's own generator, so a task is the same on every worker.

    Args:
        crop_padding: padding on each side in pixels.
        flip: probability of a horizontal flip.
        brightness: x for the brightness.
        contrast: x for the contrast.
        saturation: x for the saturation; without effect on images of one channel.
    """

    crop_padding: Annotated[int, Ge(0)] = 0
    flip: Fraction = 0.0
    brightness: Fraction = 0.0
    contrast: Fraction = 0.0
    saturation: Fraction = 0.0

    @cached_property
    def is_identity(self) -> bool:
        """Whether the transform changes nothing."""
        return not any(asdict(self).values())

    def __call__(self, inputs: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """Augment images.

        Args:
            inputs: float32 images (n, channels, height, width) in [0, 1]; may be changed in place.
            generator: the only source of randomness; it is advanced.

        Returns:
            The augmented images, of the shape, type and range of `inputs`.
        """
        count = len(inputs)
        if self.crop_padding:
            inputs = self._crop(
                inputs, generator.integers(2 * self.crop_padding + 1, size=(count, 2))
            )
        if self.flip:
            flipped = generator.random(count) < self.flip
            inputs[flipped] = inputs[flipped, ..., ::-1]
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
        padding = (self.crop_padding, self.crop_padding)
        padded = np.pad(inputs, ((0, 0), (0, 0), padding, padding))
        for image, source, (top, left) in zip(inputs, padded, corners, strict=True):
            image[:] = source[:, top : top + height, left : left + width]
        return inputs

    def protocol(self) -> dict[str, object]:
        """The options that are not zero."""
        return {name: value for name, value in asdict(self).items() if value}


def _grey(images: np.ndarray) -> np.ndarray:
    """The luminance of images (n, channels, height, width), with one channel."""
    if images.shape[1] != len(_GREY_WEIGHTS):
        return images
    return np.tensordot(_GREY_WEIGHTS, images, axes=(0, 1))[:, None]


def apply_transforms(
    transforms: Sequence[ImageTransform], inputs: Tensor, generator: np.random.Generator
) -> Tensor:
    """Apply transforms, such as `torchvision.transforms.v2`, to each image separately.

    Random numbers that they take from torch's, NumPy's or Python's global generator depend on
    `generator` alone; the states of the global generators are restored.

    Args:
        transforms: the transforms, applied in this order.
        inputs: float32 images (n, channels, height, width) in [0, 1].
        generator: the source of randomness; it is advanced by one number.

    Raises:
        UserError: a transform of a library raises an error, or the results are not float32 of the
            inputs' shape.
    """
    try:
        with random_state(int(generator.integers(2**63))):
            images = [
                functools.reduce(lambda x, apply: apply(x), transforms, image) for image in inputs
            ]
    except (TypeError, ValueError, RuntimeError) as error:
        if user_frame(error):
            raise
        raise UserError(
            f"dataset.transforms cannot be applied to images of shape {tuple(inputs.shape[1:])} "
            f"({first_line(error)}): change or remove the transform."
        ) from error
    expected = (torch.float32, tuple(inputs.shape[1:]))
    for image in images:
        actual = (getattr(image, "dtype", type(image)), tuple(getattr(image, "shape", ())))
        if actual != expected:
            raise UserError(
                f"dataset.transforms give {actual[0]} of shape {actual[1]}, expected {expected[0]} "
                f"of the image's shape {expected[1]}: change the transform that does not keep them."
            )
    return torch.stack(images)


def transform_names(transforms: Sequence[ImageTransform]) -> list[str]:
    """The names and options of transforms, for a protocol."""
    return [_name(transform) for transform in transforms]


def _name(value: object) -> str:
    """The name of a transform with its options, without memory addresses."""
    if isinstance(value, functools.partial):
        options = [f"{key}={_name(option)}" for key, option in sorted(value.keywords.items())]
        return f"{_name(value.func)}({', '.join([*map(_name, value.args), *options])})"
    if hasattr(value, "__qualname__"):
        return str(value.__qualname__)
    if not callable(value) or type(value).__repr__ is not object.__repr__:
        # The name of a transform of torchvision has the names of those in it.
        return _ADDRESS.sub("", " ".join(repr(value).split()))
    attributes = getattr(value, "__dict__", {})
    arguments = [key for key in inspect.signature(type(value)).parameters if key in attributes]
    options = [f"{key}={attributes[key]!r}" for key in arguments if _is_plain(attributes[key])]
    return f"{type(value).__name__}({', '.join(options)})" if options else type(value).__name__


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, bool | int | float | str)
