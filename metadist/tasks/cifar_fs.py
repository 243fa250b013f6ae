"""CIFAR-FS: the 100 classes of CIFAR-100 for few-shot tasks, 600 images each, 32 by 32 pixels."""

import gzip
import io
import tarfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from metadist.errors import UserError, one_line
from metadist.tasks import array_cache, data_files, restricted_pickle
from metadist.tasks.array_cache import ArraySpec, CachedArray
from metadist.tasks.data_files import error_with_type, root_errors
from metadist.tasks.decoded_images import DecodedImages
from metadist.tasks.episode import SPLITS
from metadist.tasks.restricted_pickle import CONTENT_ERRORS, to_images, to_integers, to_text
from metadist.tasks.transforms import Augment, ImageTransform, Normalize

EXAMPLES = 600
"""Images per class, from CIFAR-100's own training and test set together."""

SIDE = 32
"""Height and width in pixels."""

_FOLDER = "cifar-100-python"
_ARCHIVE = f"{_FOLDER}.tar.gz"

_PARTS = ("train", "test", "meta")
MAX_DECOMPRESSED_BYTES = 1 << 30
_FORMAT = 1
"""Part of the fingerprint; raise it when the same files are decoded to another array."""

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
    class_split = "bertinetto"
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

    def _load(self, root: Path) -> tuple[np.ndarray, list[str]]:
        return load_images(root, self.download)

    def _split(self, names: Sequence[str], root: Path) -> dict[str, np.ndarray]:
        return {
            split: np.array([names.index(name) for name in self.classes[split]]) for split in SPLITS
        }


def load_images(root: Path, download: bool) -> CachedArray:
    """The images: cached, or from CIFAR-100's files or a download; see `CifarFS`."""
    source = _find(root)
    if source is None:
        advice = (
            f"put {_ARCHIVE} from https://www.cs.toronto.edu/~kriz/cifar.html into {root}, or set "
            "dataset.root to the directory that has it"
        )
        if not download:
            raise UserError(
                f"{root} has neither {_ARCHIVE} nor the folder of its contents; {advice}, or set "
                "dataset.download=true."
            )
        source = root / _ARCHIVE
        data_files.download(source, _published_archive, "CIFAR-100", advice)
    files = [source] if source.is_file() else [source / part for part in _PARTS]
    digest = data_files.fingerprint([(file.name, file) for file in files], _FORMAT)
    return array_cache.load_or_create(
        root, f"cifar_fs_{digest}.npy", lambda: read(source, _CLASS_NAMES)
    )


def _find(root: Path) -> Path | None:
    """The folder or else the archive of CIFAR-100 in `root`, if present.

    Raises:
        UserError: `root` is not a directory or cannot be read.
    """
    with root_errors(root, "CIFAR-100"):
        if all((root / _FOLDER / part).is_file() for part in _PARTS):
            return root / _FOLDER
        return root / _ARCHIVE if (root / _ARCHIVE).is_file() else None


def _published_archive() -> tuple[str, str]:
    """URL and MD5 digest."""
    from torchvision.datasets import CIFAR100

    return CIFAR100.url, CIFAR100.tgz_md5


def read(source: Path, names: Sequence[str]) -> ArraySpec:
    """Read all images of some classes.

    Args:
        source: the path of the folder or of the archive.
        names: the names of the classes in CIFAR-100, such as `maple_tree`.

    Returns:
        uint8 of shape (len(names), 600, 3, 32, 32), one row per class, training images first.

    Raises:
        UserError: the files are damaged or incomplete, or have anything but plain data.
    """
    try:
        contents = _read_folder(source) if source.is_dir() else _read_archive(source)
        all_names = contents["meta"]["fine_label_names"]
        label_of = {to_text(name): label for label, name in enumerate(all_names)}
        parts = [_images_and_labels(contents[part]) for part in ("train", "test")]
        indices = [[np.flatnonzero(labels == label_of[n]) for _, labels in parts] for n in names]
    except UserError:
        raise
    except CONTENT_ERRORS as error:
        raise UserError(
            f"{source} is no copy of CIFAR-100 ({error_with_type(error)}); replace it with a "
            "complete copy."
        ) from error
    for name, part_indices in zip(names, indices, strict=True):
        if (count := sum(map(len, part_indices))) != EXAMPLES:
            raise UserError(
                f"the class {name} of {source} has {count} images where CIFAR-100 has {EXAMPLES}; "
                "replace it with a complete copy."
            )

    def rows() -> Iterator[np.ndarray]:
        for part_indices in indices:
            pixels = [images[i] for (images, _), i in zip(parts, part_indices, strict=True)]
            yield np.concatenate(pixels).reshape(EXAMPLES, 3, SIDE, SIDE)

    return ArraySpec((EXAMPLES, 3, SIDE, SIDE), list(names), rows())


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
