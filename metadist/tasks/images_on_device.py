"""Images that stay on a device, so that making episodes copies no images."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_SHARE = 4
"""Images take at most 1 / _SHARE of a device's free memory."""


def fits_on_device(classes: np.ndarray | Sequence[np.ndarray], device: torch.device) -> bool:
    """Whether images take at most a quarter of a GPU's free memory; False for the CPU."""
    if device.type != "cuda":
        return False
    free, _ = torch.cuda.mem_get_info(device)
    return sum(images.nbytes for images in classes) <= free // _SHARE


class ImagesOnDevice:
    """The images of all classes, copied to a device.

    Args:
        classes: uint8, one array of images per class.
        device: the CPU or a GPU.
    """

    def __init__(self, classes: np.ndarray | Sequence[np.ndarray], device: torch.device) -> None:
        sizes = [len(images) for images in classes]
        shape = (sum(sizes), *classes[0].shape[1:])
        self.pixels = torch.empty(shape, dtype=torch.uint8, device=device)
        for part, images in zip(self.pixels.split(sizes), classes, strict=True):
            part.copy_(torch.from_numpy(np.array(images)))  # a copy: files are mapped read-only
        self._starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])

    def select(self, classes: np.ndarray, examples: np.ndarray, rotations: np.ndarray) -> Tensor:
        """Select images by class and example, rotated by class; does not wait for the device.

        Args:
            classes: class indices of shape (tasks, ways).
            examples: example indices within the class, of shape (tasks, ways, count).
            rotations: quarter turns counterclockwise, of shape (tasks, ways).

        Returns:
            uint8 of shape (tasks, ways, count, *image shape).
        """
        indices = self._starts[classes][..., None] + examples
        numbers = torch.from_numpy(np.concatenate([indices, rotations[..., None]], -1))
        if self.pixels.is_cuda:
            numbers = numbers.pin_memory()
        numbers = numbers.to(self.pixels.device, non_blocking=self.pixels.is_cuda)
        pixels = self.pixels[numbers[..., :-1]]
        class_turns = numbers[..., -1].view(*classes.shape, *(1,) * (pixels.dim() - classes.ndim))
        for turns in np.unique(rotations[rotations > 0]).tolist():
            rotated = torch.rot90(pixels, turns, (-2, -1))
            pixels = torch.where(class_turns == turns, rotated, pixels)
        return pixels
