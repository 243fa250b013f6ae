"""Convert images of any size and kind to inputs of a trained model."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from metadist.errors import UserError, first_line, one_line
from metadist.tasks.data_files import resize_image
from metadist.tasks.image_files import decode_file
from metadist.tasks.transforms import Normalize

_CHANNELS: tuple[int, ...] = (1, 3, 4)
_IMAGE_FORMS = (
    "give integers from 0 to 255 or floats from 0 to 1 of shape (height, width), (height, width, "
    "channels) or (channels, height, width)."
)


@dataclass(frozen=True)
class ImagePreprocessing:
    """Prepare images as a dataset prepares its image files for evaluation.

    Transparent images are composited onto a white background. Each image is converted to greyscale
    or RGB, resized with Lanczos' filter, inverted if the dataset inverts its files, scaled to
    [0, 1] and normalized.

    Args:
        input_shape: the model's input shape, (channels, height, width): 1 channel for greyscale,
            3 for RGB.
        inverted: see `ImageClasses.inverted`.
        normalize: normalization of every image.

    Raises:
        UserError: `input_shape` is not the shape of square greyscale or RGB images.
    """

    input_shape: tuple[int, ...]
    inverted: bool = False
    normalize: Normalize = field(default_factory=Normalize)

    def __post_init__(self) -> None:
        if not self.supports(self.input_shape):
            raise UserError(
                f"inputs of shape {self.input_shape} are no square images in greyscale or RGB: "
                "give the model's own inputs, without preprocessing."
            )

    @staticmethod
    def supports(input_shape: Sequence[int]) -> bool:
        """Whether inputs of this shape are square images of one or three channels."""
        return (
            len(input_shape) == 3 and input_shape[0] in (1, 3) and input_shape[1] == input_shape[2]
        )

    def __call__(self, images: Any) -> Tensor:
        """Prepare a batch.

        Args:
            images: a sequence, array or tensor of images. An image is the path of a file, a Pillow
                image, or an array or tensor of shape (height, width), (height, width, channels) or
                (channels, height, width), with integers from 0 to 255 or floats from 0 to 1, which
                are rounded to 8 bits. If both orders fit the shape, channels come last in an array
                and first in a tensor.

        Returns:
            float32 of shape (n, *input_shape).

        Raises:
            UserError: an image cannot be read or is of another kind.
        """
        images = self.as_list(images)
        pixels = np.zeros((len(images), *self.input_shape), np.uint8)
        for row, image in zip(pixels, images, strict=True):
            row[:] = self._pixels(image)
        inputs = torch.from_numpy(255 - pixels if self.inverted else pixels) / 255
        return self.normalize(inputs)

    def as_list(self, images: Any) -> list[Any]:
        """A batch as a list of images, of which any part is a batch, too.

        Args:
            images: see `__call__`.

        Raises:
            UserError: `images` is a single image.
        """
        if isinstance(images, str | PathLike | Image.Image):
            raise UserError("one image was given instead of several: give a list, [image].")
        if isinstance(images, np.ndarray | Tensor):
            # Channels come last in an array. A tensor of shape (1, height, width) or, if images are
            # grey, (3, height, width) may be several grey images.
            channels, counts = images.shape[-1], _CHANNELS
            if isinstance(images, Tensor):
                channels, counts = images.shape[0], (3, 4) if self.input_shape[0] > 1 else ()
            if images.ndim == 2 or (images.ndim == 3 and channels in counts):
                raise UserError(
                    f"an image of shape {tuple(images.shape)} was given instead of several: give "
                    "a list, [image]."
                )
        return list(images)

    def _pixels(self, image: Any) -> np.ndarray:
        """The pixels of one image, uint8 of the input shape."""
        mode, size = "L" if self.input_shape[0] == 1 else "RGB", self.input_shape[-1]
        if isinstance(image, str | PathLike):
            pixels = decode_file(Path(image), mode, size)
        else:
            if not isinstance(image, Image.Image):
                image = Image.fromarray(_as_bytes(image))
            try:
                pixels = resize_image(image, mode, size)
            except (OSError, ValueError) as error:
                raise UserError(
                    f"a Pillow image cannot be converted to {mode} ({one_line(error)}): give "
                    "one of 8 bits per channel."
                ) from error
        return np.moveaxis(pixels.reshape(size, size, -1), -1, 0)


def _as_bytes(image: Any) -> np.ndarray:
    """An image as uint8 of shape (height, width) or (height, width, channels)."""
    order = (0, -1) if isinstance(image, Tensor) else (-1, 0)
    if isinstance(image, Tensor):
        image = image.detach().cpu()
        image = image.float() if image.dtype == torch.bfloat16 else image  # unknown to NumPy
    try:
        pixels = np.asarray(image)
    except ValueError as error:  # nested lists of unequal lengths
        raise UserError(f"an image is not an array ({first_line(error)}): {_IMAGE_FORMS}") from None
    axes = [axis for axis in order if pixels.ndim == 3 and pixels.shape[axis] in _CHANNELS]
    if axes:
        pixels = np.moveaxis(pixels, axes[0], -1)
    if pixels.dtype.kind not in "uifb" or not pixels.size or (pixels.ndim != 2 and not axes):
        raise UserError(
            f"an image has the type {pixels.dtype} and the shape {pixels.shape}: {_IMAGE_FORMS}"
        )
    scale, largest = (255, 1) if pixels.dtype.kind in "fb" else (1, 255)
    rounding = 1e-6 if pixels.dtype.kind == "f" else 0
    if not (pixels.min() >= -rounding and pixels.max() <= largest + rounding):  # also NaN
        raise UserError(
            f"an image of type {pixels.dtype} has values from {pixels.min():g} to "
            f"{pixels.max():g}: give integers from 0 to 255 or floats from 0 to 1."
        )
    pixels = np.rint(pixels * np.float64(scale)).astype(np.uint8)
    return pixels[..., 0] if pixels.ndim == 3 and pixels.shape[-1] == 1 else pixels
