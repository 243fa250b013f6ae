"""CIFAR-FS: the 100 classes of CIFAR-100 for few-shot tasks, 600 images each, 32 by 32 pixels."""

import functools
import gzip
import io
import tarfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from metadist.errors import UserError, one_line
from metadist.tasks import data_files, restricted_pickle
from metadist.tasks.array_cache import ArraySpec
from metadist.tasks.data_files import error_with_type
from metadist.tasks.decoded_images import Counts, DecodedImages, Source
from metadist.tasks.episode import SPLITS
from metadist.tasks.restricted_pickle import CONTENT_ERRORS, to_images, to_integers, to_text
from metadist.tasks.transforms import Augment, ImageTransform, Normalize

SIDE = 32
"""Height and width in pixels."""

_FOLDER = "cifar-100-python"
_ARCHIVE = f"{_FOLDER}.tar.gz"
_URL = f"https://www.cs.toronto.edu/~kriz/{_ARCHIVE}"
_CHECKSUM = "md5:eb9058c3a382ffc7106e4002c42a8d85"

_PARTS = ("train", "test", "meta")
MAX_DECOMPRESSED_BYTES = 1 << 30

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
CLASSES = {split: names.split() for split, names in _CLASSES.items()}
"""The published split, by the names of CIFAR-100's classes."""

_CLASS_NAMES = [name for split in SPLITS for name in CLASSES[split]]


class CifarFS(DecodedImages):
    """CIFAR-FS (Bertinetto et al. 2019, arXiv 1805.08136): CIFAR-100 in 64, 16 and 20 classes.

    A class has 600 images, from both the training set and the test set of CIFAR-100. They are
    decoded into a file of 184 MB.

    See `DecodedImages` for the other arguments.

    Attributes:
        input_shape: (3, 32, 32).
        regression: False.
        classes: for each split the names of its classes in CIFAR-100.

    Args:
        root: the directory with `cifar-100-python.tar.gz` or the folder unpacked from it.
        download: whether to download files that are not in `root` (169 MB).

    Raises:
        UserError: the files are missing, incomplete or damaged, have anything but images, or the
            download fails. The message names the file.
    """

    dataset_name = "cifar_fs"
    title = "CIFAR-100"
    class_split = "bertinetto"
    expected: ClassVar = {"": Counts(100, examples=600)}
    classes: Mapping[str, Sequence[str]] = CLASSES

    def __init__(
        self,
        root: str,
        rotations: bool = False,
        test_rotations: bool = False,
        normalize: Normalize | None = None,
        augment: Augment | None = None,
        transforms: Sequence[ImageTransform] = (),
        download: bool = True,
    ) -> None:
        self.download = download
        super().__init__(root, rotations, test_rotations, normalize, augment, transforms)

    def _find(self, root: Path) -> Source:
        origin = root / _FOLDER
        files = [origin / part for part in _PARTS]
        if not all(file.is_file() for file in files):
            origin = root / _ARCHIVE
            files = [origin]
        if not origin.exists():
            advice = (
                f"put {_ARCHIVE} from https://www.cs.toronto.edu/~kriz/cifar.html into {root}, or "
                "set dataset.root to the directory that has it"
            )
            if not self.download:
                raise UserError(
                    f"{root} has neither {_ARCHIVE} nor the folder of its contents; {advice}, or "
                    "set dataset.download=true."
                )
            data_files.download(origin, _URL, _CHECKSUM, advice)
        decode = functools.partial(read, origin, _CLASS_NAMES)
        return Source("cifar_fs", [(file.name, file) for file in files], (), decode, {"": origin})

    def _split(self, names: Sequence[str], root: Path) -> dict[str, np.ndarray]:
        return {
            split: np.array([names.index(name) for name in self.classes[split]]) for split in SPLITS
        }


def read(source: Path, names: Sequence[str]) -> ArraySpec:
    """Read all images of some classes.

    Args:
        source: the path of the folder or of the archive.
        names: the names of the classes in CIFAR-100, such as `maple_tree`.

    Returns:
        uint8 of shape (images, 3, 32, 32), sorted by class, training images first.

    Raises:
        UserError: the files are damaged or incomplete, or have anything but plain data.
    """
    try:
        contents = _read_folder(source) if source.is_dir() else _read_archive(source)
        all_names = contents["meta"]["fine_label_names"]
        label_of = {to_text(name): label for label, name in enumerate(all_names)}
        parts = [_images_and_labels(contents[part]) for part in ("train", "test")]
        rows = [
            (name, images[index])
            for name in names
            for images, labels in parts
            for index in np.flatnonzero(labels == label_of[name])
        ]
    except UserError:
        raise
    except CONTENT_ERRORS as error:
        raise UserError(
            f"{source} is no copy of CIFAR-100 ({error_with_type(error)}); replace it with a "
            "complete copy."
        ) from error
    row_names = [f"{name}/{number}" for number, (name, _) in enumerate(rows)]
    pixels = (image.reshape(3, SIDE, SIDE) for _, image in rows)
    return ArraySpec((3, SIDE, SIDE), row_names, pixels)


def _images_and_labels(contents: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Images (n, 3072), all red values first, then green, then blue; and labels (n,)."""
    images = to_images(contents["data"], (3 * SIDE * SIDE,))
    labels = to_integers(contents["fine_labels"], len(images))
    if len(labels) != len(images):
        raise ValueError(f"{len(labels)} labels for {len(images)} images")
    return images, labels


def _read_folder(folder: Path) -> dict[str, dict[str, Any]]:
    return {part: restricted_pickle.load_file(folder / part) for part in _PARTS}


def _read_archive(archive: Path) -> dict[str, dict[str, Any]]:
    """The parts' contents. No file is extracted to disk, and other members are ignored."""
    contents = {}
    try:
        with (
            gzip.open(archive) as file,
            tarfile.open(fileobj=_BoundedReader(file), mode="r|") as members,
        ):
            for member in members:
                folder, _, part = member.name.removeprefix("./").rpartition("/")
                extracted = members.extractfile(member) if member.isfile() else None
                if extracted and folder == _FOLDER and part in _PARTS:
                    name = f"{member.name} in {archive}"
                    contents[part] = restricted_pickle.load(extracted.read(), name)
    except UserError:
        raise
    except (OSError, EOFError, zlib.error, tarfile.TarError, ValueError) as error:
        raise UserError(
            f"{archive} is not a readable archive ({one_line(error)}); delete it and put the "
            "complete file there."
        ) from error
    return contents


class _BoundedReader(io.RawIOBase):
    """Limits the decompressed size, since a small archive could decompress to fill the memory."""

    def __init__(self, file: gzip.GzipFile) -> None:
        self._file = file
        self._left = MAX_DECOMPRESSED_BYTES

    def read(self, size: int = -1) -> bytes:
        most = self._left + 1
        data = self._file.read(most if size < 0 else min(size, most))
        self._left -= len(data)
        if self._left < 0:
            raise ValueError(f"it decompresses to more than {MAX_DECOMPRESSED_BYTES >> 30} GiB")
        return data
