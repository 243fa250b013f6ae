"""CUB-200-2011: 200 species of birds."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
from annotated_types import Interval

from metadist.errors import UserError
from metadist.tasks import array_cache, image_files
from metadist.tasks.image_files import ImageClass
from metadist.tasks.image_folder import group_by_class, load_classes
from metadist.tasks.images import ImageClasses
from metadist.tasks.transforms import Augment, ImageTransform, Normalize

CLASSES = 200
"""Species, in folders such as `001.Black_footed_Albatross`."""

FOLDERS = ("", "images", "CUB_200_2011/images", "cubirds200/CUB_200_2011/images")
"""Where the species' folders may be below `root`; the last is learn2learn's."""


class CUB(ImageClasses):
    """CUB-200-2011 (Wah et al. 2011) in the split of Chen et al. 2019 (arXiv 1904.04232).

    100 species for training, 50 for validation and 50 for test: numbered from 0, even species are
    for training, those of remainder 1 modulo 4 for validation and those of remainder 3 for test, as
    in the authors' code and torchmeta. (Other papers use the split of Hilliard et al. 2018, and
    learn2learn 140, 30 and 30 species.) A species has 41 to 60 images, which are resized whole,
    without the bounding boxes. One process decodes them once, into a file that every process maps.

    Attributes:
        input_shape: (3, size, size).
        regression: False.
    """

    def __init__(
        self,
        root: str,
        size: Annotated[int, Interval(ge=8, le=1024)] = 84,
        rotations: bool = False,
        test_rotations: bool = False,
        normalize: Normalize | None = None,
        augment: Augment | None = None,
        transforms: Sequence[ImageTransform] = (),
    ) -> None:
        """Find the images in `root`.

        Args:
            root: directory with `CUB_200_2011/images`, as unpacked from `CUB_200_2011.tgz`, or with
                `images` or the species' folders themselves. It need not be writable: the images are
                then cached in `$METADIST_CACHE`, `$XDG_CACHE_HOME/metadist` or `~/.cache/metadist`.
            size: height and width in pixels that images are resized to, 8 to 1024.
            rotations: whether sampled training classes are rotated by multiples of 90°.
            test_rotations: the same for validation and test.
            normalize: normalization of every image; None for none.
            augment: augmentation of training images, before normalization; None for none.
            transforms: further ones, after `augment`; see `apply_transforms`.

        Raises:
            UserError: the species' folders are missing or incomplete, or an image is damaged.
        """
        array, names = load_images(Path(root).expanduser(), size)
        images, class_names = group_by_class(array, names)
        remainders = np.arange(CLASSES) % 4
        super().__init__(
            "cub",
            images,
            {
                "train": np.flatnonzero(remainders % 2 == 0),
                "validation": np.flatnonzero(remainders == 1),
                "test": np.flatnonzero(remainders == 3),
            },
            rotations,
            test_rotations,
            normalize=normalize,
            augment=augment,
            transforms=transforms,
            class_names=[name.lstrip("/") for name in class_names],
        )

    def protocol(self) -> dict[str, object]:
        """Name of the dataset, its split, rotations, image size, and transforms if any."""
        return {
            **super().protocol(),
            "class_split": "chen",
            "classes": {split: len(members) for split, members in self.splits.items()},
            "image_size": self.input_shape[-1],
        }


def load_images(root: Path, size: int) -> array_cache.CachedArray:
    """The decoded images: cached, or from the species' folders; see `CUB`.

    Raises:
        UserError: `root` has not 200 species with images, or a file cannot be read or decoded.
    """
    stem = f"cub_{size}px"
    classes: list[ImageClass] = []
    with image_files.root_errors(root, "CUB-200-2011"):
        for folder in FOLDERS:
            if (root / folder / "001.Black_footed_Albatross").is_dir():
                classes = image_files.class_folders(root / folder)
                break
    if not classes and (found := array_cache.load_any(root, stem)) is not None:
        return found
    if len(classes) != CLASSES or not all(each.files for each in classes):
        count = sum(bool(each.files) for each in classes)
        raise UserError(
            f"{root} has {count} species of CUB-200-2011 with images, expected {CLASSES}, in "
            "CUB_200_2011/images/001.Black_footed_Albatross and so on: run metadist fetch cub, or "
            "set dataset.root to the directory that has them"
        )
    return load_classes(root, stem, classes, size, "RGB")
