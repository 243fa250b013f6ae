"""Checks of a written PNG file."""

from pathlib import Path

import numpy as np
from matplotlib.image import imread

GREEN, RED = (0x2C, 0x97, 0x4B), (0xCF, 0x36, 0x36)


def check_png(
    path: Path, width: tuple[int, int] = (500, 2500), height: tuple[int, int] = (300, 3000)
) -> np.ndarray:
    """The pixels of a PNG file of a sensible size that is not blank and not cut off."""
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    pixels = imread(path)[..., :3]
    assert width[0] <= pixels.shape[1] <= width[1]
    assert height[0] <= pixels.shape[0] <= height[1]
    assert pixels.var() > 1e-3
    edge = np.concatenate([pixels[:, :3].ravel(), pixels[:, -3:].ravel()])
    assert edge.min() > 0.9  # nothing extends beyond the sides
    return pixels


def count_color(pixels: np.ndarray, color: tuple[int, int, int]) -> int:
    """How many pixels are within 3 of a color of 0 to 255."""
    return int((np.abs(pixels - np.array(color) / 255) < 3 / 255).all(axis=-1).sum())
