"""MiniImageNet: 100 classes of ImageNet, 600 images each, 84 by 84 pixels."""

from pathlib import Path

import numpy as np

from metadist.errors import UserError
from metadist.tasks import array_cache, mini_imagenet_files
from metadist.tasks.array_cache import NamedArray
from metadist.tasks.images import ImageClasses
from metadist.tasks.mini_imagenet_split import PUBLISHED
from metadist.tasks.transforms import Augment, Normalize


class MiniImageNet(ImageClasses):
    """MiniImageNet in the split of Ravi and Larochelle (2017, openreview rJY0-Kcll).

    64 classes for training, 16 for validation and 20 for test, in RGB; images of another size
    are resized to 84 x 84 by Lanczos' filter, as in MAML's code. There is no download: ImageNet's
    terms do not allow one.

    The images are decoded once, by one process while others wait, into a file of 1.27 GB that
    every process of a node maps; what is in memory is what the system keeps of that file.

    Attributes:
        input_shape: (3, 84, 84).
        regression: False.
        classes: for each split the names of its classes, such as `n01532829`.
    """

    def __init__(
        self,
        root: str,
        rotations: bool = False,
        test_rotations: bool = False,
        normalize: Normalize | None = None,
        augment: Augment | None = None,
    ):
        """Find the images in `root`.

        Args:
            root: directory in one of these layouts, the first that is there: folders `train`,
                `val` and `test` with a folder of images for each class; `images/` with
                `train.csv`, `val.csv` and `test.csv` (`filename,label`), the images in it or in a
                folder of it for each class; `mini-imagenet-cache-train.pkl`, `-val.pkl` and
                `-test.pkl`; `miniImageNet_category_split_train_phase_train.pickle`, `_val.pickle`
                and `_test.pickle`. It need not be writable: the decoded images then go to
                `$METADIST_CACHE`, `$XDG_CACHE_HOME/metadist` or `~/.cache/metadist`.
            rotations: whether drawn training classes are turned by multiples of 90°.
            test_rotations: the same for validation and test.
            normalize: what is done to the pixels of every image; None for nothing.
            augment: what is done to training images before; None for nothing.

        Raises:
            UserError: the files are missing, incomplete or damaged, or hold more than images. The
                message names the file.
        """
        images, names = _load(Path(root).expanduser())
        parts = np.array([name.partition("/")[0] for name in names])
        splits = {part: np.flatnonzero(parts == part) for part in mini_imagenet_files.CLASSES}
        super().__init__(
            "mini_imagenet",
            images,
            splits,
            rotations,
            test_rotations,
            normalize=normalize,
            augment=augment,
        )
        self.classes = {
            part: [names[index].partition("/")[2] for index in members]
            for part, members in splits.items()
        }

    def protocol(self) -> dict[str, object]:
        """Name of the dataset, its split, rotations, image size, and transforms if any.

        The split is "unknown" where the classes are not known by their WordNet identifiers, or
        are others than Ravi and Larochelle's.
        """
        return {
            **super().protocol(),
            # Copies go round with classes of one's own choice, or under other names.
            "class_split": "ravi_larochelle" if self.classes == PUBLISHED else "unknown",
            "classes": {part: len(members) for part, members in self.splits.items()},
            "image_size": self.images.shape[-1],
        }


def _load(root: Path) -> NamedArray:
    """The decoded images: from a file made before, else from one of the layouts."""
    stem = "mini_imagenet"
    layout = mini_imagenet_files.find(root)
    if layout is None:
        if (found := array_cache.load_any(root, stem)) is not None:
            return found
        raise UserError(mini_imagenet_files.accepted(root))
    name = f"{stem}_{mini_imagenet_files.digest(layout)}.npy"
    return array_cache.load_or_make(
        array_cache.cache_directory(root) / name,
        lambda: mini_imagenet_files.decode(layout),
        also_at=[root / name],
    )
