"""How the file of an image becomes pixels."""

import io
import zlib

import numpy as np
from PIL import Image

from metadist.tasks.data_files import one_line


def decode_image(
    data: bytes, mode: str, size: int, formats: tuple[str, ...], largest: int
) -> np.ndarray:
    """One image, shrunk or grown to a square by Lanczos' filter, as in MAML's code.

    Args:
        data: the file's contents.
        mode: "L" for grey or "RGB".
        size: height and width of the result, in pixels.
        formats: Pillow's names of the formats that are accepted.
        largest: pixels that the image may have, so that a small file cannot fill the memory.

    Returns:
        uint8 of shape (size, size) or (size, size, 3).

    Raises:
        ValueError: why not, in one line.
    """
    if not data:
        raise ValueError("the file is empty")
    try:
        with Image.open(io.BytesIO(data), formats=formats) as image:
            if image.width * image.height > largest:
                raise ValueError(f"it has {image.width} x {image.height} pixels")
            return np.asarray(image.convert(mode).resize((size, size), Image.Resampling.LANCZOS))
    # Pillow raises these on damaged files, SyntaxError included.
    except (OSError, ValueError, SyntaxError, zlib.error, Image.DecompressionBombError) as error:
        raise ValueError(one_line(error)) from error
