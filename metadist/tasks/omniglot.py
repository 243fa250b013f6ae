"""Omniglot: 1623 handwritten characters from 50 alphabets, each drawn by 20 people."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal, get_args

import numpy as np
from annotated_types import Ge, Interval

from metadist.errors import UserError
from metadist.tasks import omniglot_files
from metadist.tasks.decoded_images import Counts, DecodedImages, Source
from metadist.tasks.episode import SPLITS
from metadist.tasks.images import split_indices
from metadist.tasks.transforms import Augment, ImageTransform, Normalize

OmniglotSplit = Literal["random", "vinyals", "alphabets", "small1", "small2"]

NON_TEST_CHARACTERS = 1200
"""Characters for training and validation in the splits "random" and "vinyals"."""

VALIDATION_CHARACTERS = 100
"""Characters for validation, among these, in the split "random"."""

VINYALS_VALIDATION = ("Armenian", "Bengali", "Early_Aramaic", "Hebrew", "Mkhedruli_(Georgian)")
"""Alphabets for validation in the split "vinyals"."""

MINIMAL_SETS = {
    "small1": ("Balinese", "Early_Aramaic", "Greek", "Korean", "Latin"),
    "small2": ("Greek", "Japanese_(katakana)", "Latin", "Sanskrit", "Tagalog"),
}
"""Alphabets of the official `images_background_small1.zip` and `images_background_small2.zip`, with
the same images as in `images_background.zip`."""


class Omniglot(DecodedImages):
    """Omniglot (Lake et al. 2015, doi 10.1126/science.aab3050) with a choice of splits.

    The default is the setting of MAML's code (Finn et al. 2017, arXiv 1703.03400): 1100, 100 and
    423 random characters; 28 x 28 pixels; each sampled class is rotated by a random multiple of
    90°, in validation and test too. Resized images have levels of grey (see `decode_image`). The
    split depends on `seed` and the characters' names alone.

    See `DecodedImages` for the file of decoded images.

    Attributes:
        input_shape: (1, size, size).
        regression: False.
        characters: for each split the names of its characters, such as
            `images_background/Latin/character01`.
        classes: the same as `characters`.
        inverted: True, since files have dark strokes on white and inputs bright strokes on black.
    """

    dataset_name = "omniglot"
    title = "Omniglot"
    expected: ClassVar = {
        "images_background": Counts(964, examples=20),
        "images_evaluation": Counts(659, examples=20),
    }
    layout = ", in files like images_background/Latin/character01/NAME.png"
    inverted = True
    group = "alphabet"
    without_groups = "dataset.within_alphabet=false"

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
        transforms: Sequence[ImageTransform] = (),
        test_drawers: bool = False,
    ) -> None:
        """Find the images in `root`, or download them there, and divide them into splits.

        Args:
            root: the directory with the folders `images_background` and `images_evaluation`, or the
                zip files of these names, possibly in `omniglot-py`.
            split: the division of the characters into training, validation and test; see
                `split_characters`.
            within_alphabet: whether all classes of a task come from one alphabet, as in the tasks
                of Lake et al.
            rotations: whether sampled training classes are rotated by multiples of 90°.
            test_rotations: the same for validation and test.
            validation_alphabets: the number of alphabets for validation in the splits "alphabets",
                "small1" and "small2".
            seed: the seed of the split; not negative.
            size: height and width of the images in pixels, 8 to 105 (as scanned).
            download: whether to download files that are not in `root`.
            normalize: normalization of every image; None for none.
            augment: augmentation of training images, before normalization; None for none.
            transforms: further transforms, after `augment`; see `apply_transforms`.
            test_drawers: whether, in validation and test, the k-th images of all classes of a task
                are by the same drawer, as in the tasks of Lake et al.: with one shot and one query,
                the support set is by one drawer and the query set by another.

        Raises:
            UserError: the files are missing, incomplete or damaged (the message names the file),
                the download fails, or arguments do not fit each other.
        """
        if test_drawers and not within_alphabet:
            raise UserError(
                "dataset.test_drawers=true needs dataset.within_alphabet=true: each alphabet has "
                "drawers of its own."
            )
        self.split, self.seed, self.size = split, seed, size
        self.validation_alphabets = validation_alphabets
        self.download = download
        super().__init__(root, rotations, test_rotations, normalize, augment, transforms)
        self.test_drawers = test_drawers
        if within_alphabet:
            self.groups = self._grouped([alphabet(name) for name in self.class_names])
        self.classes = self.characters = {
            name: [self.class_names[index] for index in members]
            for name, members in self.splits.items()
        }

    def _find(self, root: Path) -> Source:
        return omniglot_files.source(omniglot_files.find(root, self.download), self.size)

    def _split(self, names: Sequence[str], root: Path) -> dict[str, np.ndarray]:
        return split_characters(names, self.split, self.seed, self.validation_alphabets)

    def _split_protocol(self) -> dict[str, object]:
        """The split and its seed, and which characters and images a task may have."""
        return {
            "class_split": self.split,
            **({} if self.split == "vinyals" else {"split_seed": self.seed}),
            "within_alphabet": self.groups is not None,
            **({"test_drawers": True} if self.test_drawers else {}),
        }


def alphabet(name: str) -> str:
    """The alphabet of a character: `images_background/Latin` of `images_background/Latin/…`."""
    return name.rpartition("/")[0]


def split_characters(
    names: Sequence[str], split: str, seed: int, validation_alphabets: int
) -> dict[str, np.ndarray]:
    """Divide characters into training, validation and test, as indices into `names`.

    - "random": 1100, 100 and 423 random characters, as in MAML's code (arXiv 1703.03400).
    - "vinyals": 1028, 172 and 423 characters, mostly by whole alphabets: the lists of Vinyals et
      al. (2016, arXiv 1606.04080), as published with prototypical networks (arXiv 1703.05175).
      Of the first 1200 characters in the order of their names, the characters of five alphabets
      are for validation and the others for training; all later characters are for test.
    - "alphabets": the split of Lake et al. (2015, doi 10.1126/science.aab3050). The 20 alphabets of
      the evaluation set are for test, random alphabets of the background set for validation, and
      its other alphabets for training.
    - "small1", "small2": the same test alphabets; training on one of the two minimal background
      sets of five alphabets, validation on random other background alphabets. Model selection by
      validation therefore uses more than the minimal set.

    Args:
        names: the names of all characters, such as `images_background/Latin/character01`, sorted.
        split: one of `OmniglotSplit`.
        seed: seed of the random choices, not negative.
        validation_alphabets: the number of alphabets for validation in the last three splits.

    Returns:
        int64 indices for "train", "validation" and "test".

    Raises:
        UserError: there is no such split, or there are too many alphabets for validation.
    """
    if split not in get_args(OmniglotSplit):
        choices = ", ".join(get_args(OmniglotSplit))
        raise UserError(f"dataset.split={split} is none of Omniglot's splits: choose {choices}.")
    if split == "random":
        order = np.random.default_rng(seed).permutation(len(names))
        bounds = (NON_TEST_CHARACTERS - VALIDATION_CHARACTERS, NON_TEST_CHARACTERS)
        return dict(zip(SPLITS, np.split(order, bounds), strict=True))
    if split == "vinyals":
        split_of = dict.fromkeys(_background_names(VINYALS_VALIDATION), "validation")
        splits = [split_of.get(alphabet(name), "train") for name in names]
        splits[NON_TEST_CHARACTERS:] = ["test"] * (len(names) - NON_TEST_CHARACTERS)
        return split_indices(splits)
    background = sorted({alphabet(n) for n in names if n.startswith("images_background/")})
    training = _background_names(MINIMAL_SETS[split]) if split in MINIMAL_SETS else set(background)
    # Validation alphabets are taken from the training set, unless that set is fixed.
    free = [name for name in background if split == "alphabets" or name not in training]
    if not 1 <= validation_alphabets < len(free):
        raise UserError(
            f"dataset.validation_alphabets={validation_alphabets} does not fit: from 1 to "
            f"{len(free) - 1} alphabets can be held out with dataset.split={split}."
        )
    order = np.random.default_rng(seed).permutation(len(free))
    split_of = {name: "test" for name in map(alphabet, names) if name not in background}
    split_of |= dict.fromkeys(training, "train")
    split_of |= {free[index]: "validation" for index in order[:validation_alphabets]}
    return split_indices([split_of.get(alphabet(name), "unused") for name in names])


def _background_names(alphabets: Sequence[str]) -> set[str]:
    return {f"images_background/{name}" for name in alphabets}
