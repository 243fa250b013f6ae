"""Images in a directory of class folders: a user's own data."""

import functools
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge, Gt, Interval, Lt

from metadist.errors import UserError
from metadist.tasks import array_cache, data_files, image_files
from metadist.tasks.array_cache import ArraySpec, CachedArray
from metadist.tasks.episode import SPLITS
from metadist.tasks.image_files import ImageClass
from metadist.tasks.images import ImageClasses
from metadist.tasks.transforms import Augment, ImageTransform, Normalize

_FORMAT = 1
"""Part of the fingerprint; raise it when the same files are decoded to another array."""


class ImageFolder(ImageClasses):
    """A directory of class folders, with any number of classes and of images in each.

    One process decodes the images once, into a file that every process maps.

    The directory is divided into splits by folders `train`, `val` (or `validation`) and `test` with
    a folder for each class; or by `images/` with `train.csv`, `val.csv` and `test.csv`
    (`filename,label`). Where there is no such division, classes are divided at random, by `seed`;
    where only the classes for validation are not given, they are taken from those for training.

    Attributes:
        input_shape: (channels, size, size).
        regression: False.
        classes: for each split the names of its classes.
    """

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
        """Find the images in `root`.

        Args:
            root: the directory. A class has all images in its folder and in folders below it:
                JPEG, PNG, BMP, GIF, TIFF, WebP, PPM or PGM. It need not be writable: the images are
                then cached in `$METADIST_CACHE`, `$XDG_CACHE_HOME/metadist` or `~/.cache/metadist`.
            size: height and width in pixels that images are resized to, 8 to 1024.
            channels: 3 for RGB, 1 for greyscale.
            seed: seed of the division into splits, where the directory has none; not negative.
            validation_fraction: fraction of the classes for validation, where the directory does
                not say which.
            test_fraction: fraction of the classes for test, where the directory has no splits.
            skip_small_classes: whether classes with fewer images than shots and queries are left
                out, instead of being an error.
            rotations: whether sampled training classes are rotated by multiples of 90°.
            test_rotations: the same for validation and test.
            normalize: normalization of every image; None for none.
            augment: augmentation of training images, before normalization; None for none.
            transforms: further ones, after `augment`; see `apply_transforms`.

        Raises:
            UserError: the directory has no classes of images or cannot be divided into splits, an
                image cannot be decoded, or two splits share a class.
        """
        array, names = load_images(Path(root).expanduser(), size, channels)
        images, class_names = group_by_class(array, names)
        splits = split_classes(class_names, seed, validation_fraction, test_fraction, root)
        super().__init__(
            "folder",
            images,
            splits,
            rotations,
            test_rotations,
            normalize=normalize,
            augment=augment,
            transforms=transforms,
            class_names=[name.lstrip("/") for name in class_names],
            skip_small_classes=skip_small_classes,
        )
        self.classes = {
            split: [class_names[index].partition("/")[2] for index in members]
            for split, members in splits.items()
        }
        given = any(name.startswith("validation/") for name in class_names)
        self.seed = None if given else seed

    def protocol(self) -> dict[str, object]:
        """Fingerprint of the classes' names, seed of the split, image size, transforms if any."""
        return {
            **super().protocol(),
            "class_names": data_files.fingerprint((), sorted(self.classes.items())),
            **({} if self.seed is None else {"split_seed": self.seed}),
            "classes": {split: len(members) for split, members in self.splits.items()},
            "image_size": self.input_shape[-1],
        }


def load_images(root: Path, size: int, channels: int) -> CachedArray:
    """The decoded images, cached: uint8 (n, [3,] size, size), named `SPLIT/CLASS/FILE`.

    Args:
        root: as of `ImageFolder`.
        size: height and width, in pixels.
        channels: 3 for RGB, 1 for greyscale, then without the dimension of channels.

    Raises:
        UserError: `root` has no images in class folders, or a file cannot be read or decoded.
    """
    stem = f"folder_{size}px_{channels}"
    classes = [each for each in image_files.find_classes(root, "class folders") if each.files]
    if not classes:
        if (found := array_cache.load_any(root, stem)) is not None:
            return found
        raise UserError(
            f"{root} has no images in class folders: give a directory with a folder of images for "
            "each class, or with folders train, val and test of class folders"
        )
    image_files.check_disjoint(((each.split, each.name) for each in classes), root)
    return load_classes(root, stem, classes, size, "RGB" if channels == 3 else "L")


def load_classes(
    root: Path, stem: str, classes: Sequence[ImageClass], size: int, mode: str
) -> CachedArray:
    """The decoded images of classes, cached under the name `stem`; see `load_images`."""
    files = [file for each in classes for file in each.files]
    names = [f"{each.split}/{each.name}/{file.name}" for each in classes for file in each.files]
    paths = (file.relative_to(root).as_posix() for file in files)
    digest = data_files.fingerprint(zip(paths, files, strict=True), _FORMAT, size, mode)
    shape = (3, size, size) if mode == "RGB" else (size, size)

    def decode() -> ArraySpec:
        return ArraySpec(shape, names, image_files.decode_files(files, mode, size))

    return array_cache.load_or_create(root, f"{stem}_{digest}.npy", decode)


def group_by_class(array: np.ndarray, names: Sequence[str]) -> tuple[list[np.ndarray], list[str]]:
    """The images of each class, as views, and the classes' names `SPLIT/CLASS`."""
    of_class = ["/".join(name.split("/", 2)[:2]) for name in names]
    sizes = {name: len(list(images)) for name, images in itertools.groupby(of_class)}
    bounds = np.cumsum(list(sizes.values()))[:-1]
    return np.split(np.asarray(array), bounds), list(sizes)


def split_classes(
    names: Sequence[str], seed: int, validation_fraction: float, test_fraction: float, root: str
) -> dict[str, np.ndarray]:
    """Divide classes into training, validation and test, as indices into `names`.

    Args:
        names: `SPLIT/CLASS`, where an empty split is to be chosen.
        seed: of the random choice.
        validation_fraction: fraction of the classes without a split for validation; where only
            validation is missing, of the training classes.
        test_fraction: fraction of the classes without a split for test.
        root: the directory, for the message.

    Raises:
        UserError: there is no class left for a split.
    """
    given = np.array([name.partition("/")[0] for name in names])
    found = {split: np.flatnonzero(given == split) for split in SPLITS}
    choose = functools.partial(_choose, np.random.default_rng(seed))
    fractions: Mapping[str, float] = {}
    if not given[0]:
        found["train"] = np.arange(len(names))
        fractions = {"test": test_fraction, "validation": validation_fraction}
    elif not len(found["validation"]):
        fractions = {"validation": validation_fraction}
    total = len(found["train"])
    for split, fraction in fractions.items():
        found["train"], found[split] = choose(found["train"], max(1, round(fraction * total)))
    for split, members in found.items():
        if not len(members):
            raise UserError(
                f"the number of classes with images in {root} is {len(names)} and none is left for "
                f"{split}: add class folders, or lower dataset.validation_fraction and "
                "dataset.test_fraction"
            )
    return found


def _choose(
    generator: np.random.Generator, members: np.ndarray, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """The members without `count` random ones, and these; both sorted."""
    chosen = generator.permutation(len(members))[:count]
    return np.delete(members, chosen), np.sort(members[chosen])
