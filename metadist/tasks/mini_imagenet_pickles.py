"""MiniImageNet as pickles of arrays, in the two forms that are handed round."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from metadist.errors import UserError
from metadist.tasks import plain_pickle
from metadist.tasks.data_files import kind_and_line


class PickledClass(NamedTuple):
    """The images of one class, still in their file.

    Attributes:
        images: uint8 of shape (n, side, side, 3), all images of the file, mapped.
        places: which of them are of this class.
    """

    images: np.ndarray
    places: np.ndarray

    def __len__(self) -> int:
        return len(self.places)

    def pixels(self) -> np.ndarray:
        """uint8 of shape (images of the class, 3, side, side)."""
        found = self.images[self.places].transpose(0, 3, 1, 2)
        plain_pickle.release(self.images)
        return found


def classes(files: dict[str, Path], side: int) -> dict[str, PickledClass]:
    """The classes of some pickles, in the order of the files and of their names.

    Args:
        files: a pickle a part. It holds `image_data`, uint8 of shape (n, side, side, 3), and
            `class_dict`, the places of each class's images in it (Ren et al. 2018, arXiv
            1803.00676); or `data` of that shape, the images' `labels`, and `catname2label`
            (Gidaris and Komodakis 2018, arXiv 1804.09458).
        side: height and width of the images, in pixels.

    Returns:
        By names like `train/n01532829`. Only the places are held in memory.

    Raises:
        UserError: a file cannot be read, holds something else, or anything but plain data.
    """
    return {
        f"{part}/{name}": PickledClass(images, places)
        for part, file in files.items()
        for images, of_class in [_contents(file, side)]
        for name, places in sorted(of_class.items())
    }


def _contents(file: Path, side: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    found = plain_pickle.read_file(file)
    try:
        held = {_text(key): value for key, value in found.items()}
        if "image_data" in held:
            images = held["image_data"]
            of_class = {_text(k): _numbers(v) for k, v in held["class_dict"].items()}
        else:
            images, labels = held["data"], _numbers(held["labels"])
            names = {int(label): _text(name) for name, label in held["catname2label"].items()}
            of_class = {
                names.get(label, f"{file.stem} {label}"): np.flatnonzero(labels == label)
                for label in np.unique(labels).tolist()
            }
        if images.dtype != np.uint8 or images.shape[1:] != (side, side, 3):
            raise ValueError(f"its images are {images.dtype} of shape {images.shape}")
        everything = np.concatenate([np.zeros(0, dtype=np.int64), *of_class.values()])
        if not np.isin(everything, np.arange(len(images))).all():
            raise ValueError(f"a class names an image beyond its {len(images)}")
        if len(np.unique(everything)) != len(everything):
            raise ValueError("an image is named twice")
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise UserError(
            f"{file} is no cache of MiniImageNet ({kind_and_line(error)}): it needs "
            f"image_data, uint8 of shape (n, {side}, {side}, 3), with class_dict, or data of that "
            "shape with labels and catname2label"
        ) from error
    return images, of_class


def _numbers(values: Any) -> np.ndarray:
    return np.asarray(values, dtype=np.int64).reshape(-1)


def _text(key: Any) -> str:
    return key.decode("utf-8") if isinstance(key, bytes) else str(key)
