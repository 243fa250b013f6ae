"""Images in a directory of class folders, such as a user's own data."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge, Gt, Interval, Lt

from metadist.errors import UserError
from metadist.tasks import data_files, image_files
from metadist.tasks.decoded_images import DecodedImages, Source, image_source
from metadist.tasks.images import split_indices
from metadist.tasks.transforms import Augment, ImageTransform, Normalize

_log = logging.getLogger(__name__)

_SHOWN = 5


class ImageFolder(DecodedImages):
    """A directory of class folders, with any number of classes and of images in each.

    The directory is divided into splits by folders `train`, `val` (or `validation`, `valid`) and
    `test` with a folder for each class; or by `images/` with `train.csv`, `val.csv` and `test.csv`
    (`filename,label`). Without such a division, classes are divided at random, by `seed`; if only
    the validation classes are missing, they are taken from the training classes.

    See `DecodedImages` for the other arguments.

    Attributes:
        input_shape: (channels, size, size).
        regression: False.
        classes: for each split the names of its classes.
        seed: the seed of the division into splits; None if the directory has splits.

    Args:
        root: the directory. A class has all images in its folder and in folders below it: JPEG,
            PNG, BMP, GIF, TIFF, WebP, PPM or PGM.
        size: height and width in pixels that images are resized to, 8 to 1024.
        channels: 3 for RGB, 1 for greyscale.
        seed: the seed of the division into splits if the directory has none; not negative.
        validation_fraction: the fraction of the classes for validation if the directory has no
            validation split.
        test_fraction: the fraction of the classes for test if the directory has no splits.
        skip_small_classes: whether small classes are left out, instead of being an error: classes
            with fewer images than shots and queries, and in supervised training classes with no
            more images than are held out.

    Raises:
        UserError: the directory has no classes of images or cannot be divided into splits, an
            image cannot be decoded, or two splits share a class.
    """

    dataset_name = "folder"
    title = "class folders"
    without_small_classes = "leave these classes out with dataset.skip_small_classes=true"

    def __init__(
        self,
        root: str,
        size: Annotated[int, Interval(ge=8, le=1024)] = 84,
        channels: Literal[1, 3] = 3,
        seed: Annotated[int, Ge(0)] = 0,
        validation_fraction: Annotated[float, Gt(0), Lt(1)] = 0.2,
        test_fraction: Annotated[float, Gt(0), Lt(1)] = 0.2,
        skip_small_classes: bool = False,
        rotations: bool = False,
        test_rotations: bool = False,
        normalize: Normalize | None = None,
        augment: Augment | None = None,
        transforms: Sequence[ImageTransform] = (),
    ) -> None:
        self.size, self.channels = size, channels
        self.seed: int | None = seed
        self.fractions = {"test": test_fraction, "validation": validation_fraction}
        super().__init__(root, rotations, test_rotations, normalize, augment, transforms)
        self.skip_small_classes = skip_small_classes

    def _find(self, root: Path) -> Source:
        if not root.exists():
            raise UserError(
                f"dataset.root={root} does not exist: give the directory of {self.title}."
            )
        classes = image_files.find_classes(root)
        empty = [each.full_name for each in classes if not each.files]
        if len(empty) == len(classes):
            raise UserError(
                f"{root} has no images in class folders: give a directory with a folder of images "
                "for each class, or with folders train, val and test of class folders."
            )
        if empty:
            _log.info(
                "class folders without images (%s) are left out: %s%s",
                ", ".join(image_files.FORMATS),
                ", ".join(empty[:_SHOWN]),
                ", …" if len(empty) > _SHOWN else "",
            )
        stem, mode = f"folder_{self.size}px_{self.channels}", "RGB" if self.channels == 3 else "L"
        return image_source(stem, classes, self.size, mode)

    def _split(self, names: Sequence[str], root: Path) -> dict[str, np.ndarray]:
        fractions: Mapping[str, float] = {}
        if "/" not in names[0]:
            indices = {**split_indices([]), "train": np.arange(len(names))}
            fractions = self.fractions
        elif not len((indices := super()._split(names, root))["validation"]):
            fractions = {"validation": self.fractions["validation"]}
        else:
            self.seed = None
        self._drawn_splits = tuple(fractions)
        generator = np.random.default_rng(self.seed)
        total = len(indices["train"])
        for split, fraction in fractions.items():
            members = indices["train"]
            chosen = generator.permutation(len(members))[: max(1, round(fraction * total))]
            indices["train"], indices[split] = np.delete(members, chosen), np.sort(members[chosen])
        if total and not len(indices["train"]):
            raise UserError(
                f"the number of classes with images in {root} is {len(names)} and none is left for "
                "train: add class folders, or lower dataset.validation_fraction and "
                "dataset.test_fraction."
            )
        for split, members in indices.items():
            if not len(members):
                short = image_files.SHORT_NAMES[split]
                raise UserError(
                    f"{root} has no classes with images for {split}: add them in the folder "
                    f"{short}, or to {short}.csv if there are such lists, or give a directory of "
                    "class folders without splits."
                )
        return indices

    def _more_classes(self, split: str) -> str:
        options = [f"dataset.{drawn}_fraction" for drawn in self._drawn_splits]
        if split == "train" and options:
            return f", add classes, or lower {' or '.join(options)}"
        if split in self._drawn_splits:
            return f", add classes, or raise dataset.{split}_fraction"
        return " or add classes"

    def _split_protocol(self) -> dict[str, object]:
        """A fingerprint of the classes' names, and the split's seed if it has one."""
        return {
            "class_names": data_files.fingerprint((), sorted(self.classes.items())),
            **({} if self.seed is None else {"split_seed": self.seed}),
        }
