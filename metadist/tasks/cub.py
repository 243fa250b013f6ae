"""CUB-200-2011: 200 species of birds."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
from annotated_types import Interval

from metadist.errors import UserError
from metadist.tasks import image_files
from metadist.tasks.decoded_images import DecodedImages, load_classes
from metadist.tasks.image_files import ImageClass
from metadist.tasks.images import split_indices
from metadist.tasks.transforms import Augment, ImageTransform, Normalize

CLASSES = 200
"""Species, in folders such as `001.Black_footed_Albatross`."""

IMAGES = 11_788
"""All images of the species."""

FOLDERS = ("", "images", "CUB_200_2011/images", "cubirds200/CUB_200_2011/images")
"""The folders below `root` that may contain the species' folders; the last is learn2learn's."""


class CUB(DecodedImages):
    """CUB-200-2011 (Wah et al. 2011) in the split of Chen et al. 2019 (arXiv 1904.04232).

    100 species for training, 50 for validation and 50 for test: if species are numbered from 0,
    even numbers are for training, numbers with remainder 1 modulo 4 for validation and with
    remainder 3 for test, as in the authors' code and torchmeta. (Other papers use the split of
    Hilliard et al. 2018; learn2learn uses 140, 30 and 30 species.) A species has 41 to 60
    images, which are resized whole, without the bounding boxes.

    See `DecodedImages` for the other arguments.

    Attributes:
        input_shape: (3, size, size).
        regression: False.
        classes: for each split the names of its species, such as `001.Black_footed_Albatross`.

    Args:
        root: the directory with `CUB_200_2011/images`, as unpacked from `CUB_200_2011.tgz`, or with
            `images` or the species' folders themselves.
        size: height and width in pixels that images are resized to, 8 to 1024.

    Raises:
        UserError: the species' folders are missing or incomplete, or an image is damaged.
    """

    dataset_name = "cub"
    class_split = "chen"

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
        self.size = size
        super().__init__(root, rotations, test_rotations, normalize, augment, transforms)

    def _load(self, root: Path) -> tuple[list[np.ndarray], list[str]]:
        classes: list[ImageClass] = []
        with image_files.root_errors(root, "CUB-200-2011"):
            for folder in FOLDERS:
                if (root / folder / "001.Black_footed_Albatross").is_dir():
                    folders = image_files.class_folders(root / folder)
                    classes = [species for species in folders if species.files]
                    break
        if len(classes) != CLASSES:
            raise UserError(
                f"{root} has {len(classes)} species of CUB-200-2011 with images, expected "
                f"{CLASSES}, in CUB_200_2011/images/001.Black_footed_Albatross and so on: run "
                "metadist fetch cub, or set dataset.root to the directory that has them."
            )
        images = sum(len(species.files) for species in classes)
        if images < IMAGES:
            raise UserError(
                f"{root} has {images} images of CUB-200-2011, expected {IMAGES}: replace it with a "
                "complete copy, or use dataset=folder."
            )
        return load_classes(root, f"cub_{self.size}px", classes, self.size, "RGB")

    def _split(self, names: Sequence[str], root: Path) -> dict[str, np.ndarray]:
        by_remainder = ("train", "validation", "train", "test")
        return split_indices([by_remainder[number % 4] for number in range(len(names))])
