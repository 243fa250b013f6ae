"""CUB-200-2011: 200 species of birds."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
from annotated_types import Interval

from metadist.errors import UserError
from metadist.tasks import image_files
from metadist.tasks.decoded_images import Counts, DecodedImages, Source, image_source
from metadist.tasks.images import split_indices
from metadist.tasks.transforms import Augment, ImageTransform, Normalize

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
    title = "CUB-200-2011"
    class_split = "chen"
    expected: ClassVar = {"": Counts(200, images=11_788)}

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

    def _find(self, root: Path) -> Source:
        for folder in FOLDERS:
            if (root / folder / "001.Black_footed_Albatross").is_dir():
                classes = image_files.class_folders(root / folder)
                return image_source(f"cub_{self.size}px", classes, self.size)
        raise UserError(
            f"{root} has no species of CUB-200-2011, in CUB_200_2011/images/"
            "001.Black_footed_Albatross and so on: run metadist fetch cub, or set dataset.root to "
            "the directory that has them."
        )

    def _split(self, names: Sequence[str], root: Path) -> dict[str, np.ndarray]:
        by_remainder = ("train", "validation", "train", "test")
        return split_indices([by_remainder[number % 4] for number in range(len(names))])
