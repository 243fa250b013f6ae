"""Images that stay on a device, from which episodes are made without copying images."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_SHARE = 4
"""Images take at most this part of a device's free memory."""


class ImagesOnDevice:
    """Images of several classes on a device.

    Args:
        pixels: uint8 of shape (images, *image shape), one class after the other.
        class_sizes: the number of images of each class.
    """

    def __init__(self, pixels: Tensor, class_sizes: Sequence[int]) -> None:
        self.pixels = pixels
        self._starts = np.concatenate([[0], np.cumsum(class_sizes)[:-1]])

    @classmethod
    def copy(
        cls, classes: np.ndarray | Sequence[np.ndarray], device: torch.device
    ) -> "ImagesOnDevice | None":
        """Copy images to a device.

        Args:
            classes: uint8, for each class an array of its images.
            device: a CPU, or a GPU with enough free memory.

        Returns:
            None if the images are more than a quarter of the GPU's free memory.
        """
        sizes = [len(images) for images in classes]
        if device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(device)
            if sum(images.nbytes for images in classes) > free // _SHARE:
                return None
        shape = (sum(sizes), *classes[0].shape[1:])
        pixels = torch.empty(shape, dtype=torch.uint8, device=device)
        for part, images in zip(pixels.split(sizes), classes, strict=True):
            part.copy_(torch.from_numpy(np.array(images)))  # a copy: files are mapped read-only
        return cls(pixels, sizes)

    def select(self, classes: np.ndarray, examples: np.ndarray, rotations: np.ndarray) -> Tensor:
        """Images by class and number, rotated by class. It does not wait for the device.

        Args:
            classes: indices of shape (tasks, ways).
            examples: numbers of the images in their class, (tasks, ways, count).
            rotations: in quarter turns counterclockwise, (tasks, ways).

        Returns:
            uint8 of shape (tasks, ways, count, *image shape).
        """
        indices = self._starts[classes][..., None] + examples
        numbers = torch.from_numpy(np.concatenate([indices, rotations[..., None]], -1))
        if self.pixels.is_cuda:
            numbers = numbers.pin_memory()
        numbers = numbers.to(self.pixels.device, non_blocking=self.pixels.is_cuda)
        pixels = self.pixels[numbers[..., :-1]]
        of_class = numbers[..., -1].view(*classes.shape, *(1,) * (pixels.dim() - classes.ndim))
        for turns in np.unique(rotations[rotations > 0]).tolist():
            rotated = torch.rot90(pixels, turns, (-2, -1))
            pixels = torch.where(of_class == turns, rotated, pixels)
        return pixels
