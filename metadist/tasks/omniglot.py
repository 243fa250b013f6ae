"""Omniglot: 1623 handwritten characters from 50 alphabets, each drawn by 20 people."""

from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Interval

from metadist.errors import UserError
from metadist.tasks import array_cache, omniglot_files
from metadist.tasks.array_cache import NamedArray
from metadist.tasks.images import ImageClasses
from metadist.tasks.omniglot_splits import OmniglotSplit, alphabet, divide
from metadist.tasks.transforms import Augment, Normalize


class Omniglot(ImageClasses):
    """Omniglot (Lake et al. 2015, doi 10.1126/science.aab3050) under the protocol of one's choice.

    By default MAML's, as in its code (Finn et al. 2017, arXiv 1703.03400): 1100, 100 and 423
    random characters; 28 x 28 pixels, Lanczos; a drawn class is turned by a random multiple of
    90°, in validation and test too. The split follows from `seed` and the characters' names alone.

    The images are decoded once, in some seconds, by one process while others wait, into a file
    that is mapped into memory; later starts take a fraction of a second.

    Attributes:
        input_shape: (1, size, size).
        regression: False.
        characters: for each split the names of its characters, such as
            `images_background/Latin/character01`.
    """

    def __init__(
        self,
        root: str,
        split: OmniglotSplit = "random",
        within_alphabet: bool = False,
        rotations: bool = True,
        test_rotations: bool = True,
        validation_alphabets: Annotated[int, Ge(1)] = 5,
        seed: Annotated[int, Ge(0)] = 0,
        size: Annotated[int, Interval(ge=8, le=105)] = 28,
        download: bool = True,
        normalize: Normalize | None = None,
        augment: Augment | None = None,
    ):
        """Find the images in `root`, or download them there, and divide them into splits.

        Args:
            root: directory with the folders `images_background` and `images_evaluation`, or the
                zip files of these names, possibly in `omniglot-py`. It need not be writable: the
                decoded images then go to `$METADIST_CACHE`, `$XDG_CACHE_HOME/metadist` or
                `~/.cache/metadist`.
            split: which characters are for training, validation and test; see
                `metadist.tasks.omniglot_splits.divide`.
            within_alphabet: whether all classes of a task come from one alphabet (Lake et al.'s
                tasks) rather than from any.
            rotations: whether drawn training classes are turned by multiples of 90°.
            test_rotations: the same for validation and test.
            validation_alphabets: alphabets for validation, where `split` goes by alphabets and
                does not fix them.
            seed: of what is random in the split; not negative.
            size: height and width of the images in pixels, 8 to 105 (as scanned).
            download: whether to download what is not in `root`.
            normalize: what is done to the pixels of every image; None for nothing.
            augment: what is done to training images before; None for nothing.

        Raises:
            UserError: the files are missing, incomplete or damaged, the download fails, or an
                argument is out of its bounds. The message names the file.
        """
        if seed < 0:
            raise UserError(f"dataset.seed must be at least 0, got {seed}")
        if not 8 <= size <= 105:
            raise UserError(f"dataset.size must be from 8 to 105 pixels, got {size}")
        images, names = _load(Path(root).expanduser(), size, download)
        splits = divide(names, split, seed, validation_alphabets)
        alphabets = [alphabet(name) for name in names]
        groups = alphabets if within_alphabet else None
        super().__init__(
            "omniglot", images, splits, rotations, test_rotations, groups, normalize, augment
        )
        self.split = split
        self.seed = seed
        self.characters = {
            part: [names[index] for index in members] for part, members in splits.items()
        }

    def protocol(self) -> dict[str, object]:
        """Name of the dataset, its split and that split's seed, rotations and image size."""
        return {
            **super().protocol(),
            "class_split": self.split,
            **({} if self.split == "vinyals" else {"split_seed": self.seed}),
            "within_alphabet": self.groups is not None,
            "classes": {part: len(members) for part, members in self.splits.items()},
            "image_size": self.images.shape[-1],
        }


def _load(root: Path, size: int, download: bool) -> NamedArray:
    """The decoded images: from a file made before, else from folders, zip files or the network."""
    stem = f"omniglot_{size}px"
    sources = omniglot_files.find(root)
    missing = [name for name in omniglot_files.CHARACTERS if name not in sources]
    if missing:
        if (found := array_cache.load_any(root, stem)) is not None:
            return found
        if not download:
            files = " and ".join(missing)
            raise UserError(
                f"{root} has no {files} of Omniglot, neither as a folder nor as a zip file; "
                f"{omniglot_files.where_to_get(root, missing)}, or set dataset.download=true"
            )
        omniglot_files.download(root, missing)
        sources = omniglot_files.find(root)
    name = f"{stem}_{omniglot_files.digest(sources, size)}.npy"
    return array_cache.load_or_make(
        array_cache.cache_directory(root) / name,
        lambda: omniglot_files.decode(sources, size),
        also_at=[root / name],
    )
