"""CIFAR-FS: the 100 classes of CIFAR-100 for few-shot tasks, 600 images each, 32 by 32 pixels."""

from pathlib import Path

import numpy as np

from metadist.errors import UserError
from metadist.tasks import array_cache, cifar_files
from metadist.tasks.array_cache import NamedArray
from metadist.tasks.episode import SPLITS
from metadist.tasks.images import ImageClasses
from metadist.tasks.transforms import Augment, Normalize

_CLASSES = {
    "train": (
        "apple aquarium_fish bear bee bottle bowl boy bridge bus can castle caterpillar chair "
        "clock cloud cockroach couch cup dinosaur dolphin elephant forest girl hamster house "
        "kangaroo keyboard lawn_mower lion lizard lobster mountain mouse mushroom oak_tree orange "
        "orchid palm_tree pear pine_tree plate porcupine possum rabbit raccoon ray road seal shrew "
        "skunk skyscraper snake spider squirrel streetcar sunflower tank tiger train trout tulip "
        "turtle willow_tree wolf"
    ),
    "validation": (
        "beaver beetle butterfly camel cattle crab crocodile flatfish lamp maple_tree motorcycle "
        "otter sea shark television tractor"
    ),
    "test": (
        "baby bed bicycle chimpanzee fox leopard man pickup_truck plain poppy rocket rose snail "
        "sweet_pepper table telephone wardrobe whale woman worm"
    ),
}
CLASSES = {part: names.split() for part, names in _CLASSES.items()}
"""The published split, by CIFAR-100's names of its classes."""


class CifarFS(ImageClasses):
    """CIFAR-FS (Bertinetto et al. 2019, arXiv 1805.08136): CIFAR-100 in 64, 16 and 20 classes.

    A class has all its 600 images, whether CIFAR-100 has them for training or for test. They are
    read once, by one process while others wait, into a file of 184 MB that every process of a
    node maps.

    Attributes:
        input_shape: (3, 32, 32).
        regression: False.
    """

    def __init__(
        self,
        root: str,
        rotations: bool = False,
        test_rotations: bool = False,
        normalize: Normalize | None = None,
        augment: Augment | None = None,
        download: bool = True,
    ):
        """Find CIFAR-100 in `root`, or download it there (169 MB).

        Args:
            root: directory with `cifar-100-python.tar.gz` or the folder of its contents. It need
                not be writable: the images then go to `$METADIST_CACHE`,
                `$XDG_CACHE_HOME/metadist` or `~/.cache/metadist`.
            rotations: whether drawn training classes are turned by multiples of 90°.
            test_rotations: the same for validation and test.
            normalize: what is done to the pixels of every image; None for nothing.
            augment: what is done to training images before; None for nothing.
            download: whether to download what is not in `root`.

        Raises:
            UserError: the files are missing, incomplete or damaged, hold more than images, or the
                download fails. The message names the file.
        """
        images, names = _load(Path(root).expanduser(), download)
        splits = {part: np.array([names.index(n) for n in CLASSES[part]]) for part in SPLITS}
        super().__init__(
            "cifar_fs",
            images,
            splits,
            rotations,
            test_rotations,
            normalize=normalize,
            augment=augment,
        )

    def protocol(self) -> dict[str, object]:
        """Name of the dataset, its split, rotations, image size, and transforms if any."""
        return {
            **super().protocol(),
            "class_split": "bertinetto",
            "classes": {part: len(members) for part, members in self.splits.items()},
            "image_size": self.images.shape[-1],
        }


def _load(root: Path, download: bool) -> NamedArray:
    """The images: from a file made before, else from CIFAR-100's files, else from the network."""
    stem = "cifar_fs"
    source = cifar_files.find(root)
    if source is None:
        if (found := array_cache.load_any(root, stem)) is not None:
            return found
        if not download:
            raise UserError(
                f"{root} has neither {cifar_files.ARCHIVE} nor the folder of its contents; "
                f"{cifar_files.where_to_get(root)}, or set dataset.download=true"
            )
        cifar_files.download(root)
        source = root / cifar_files.ARCHIVE
    name = f"{stem}_{cifar_files.digest(source)}.npy"
    return array_cache.load_or_make(
        array_cache.cache_directory(root) / name,
        lambda: cifar_files.read(source, [name for part in SPLITS for name in CLASSES[part]]),
        also_at=[root / name],
    )
