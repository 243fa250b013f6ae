"""The ways in which Omniglot's characters have been divided into training, validation and test."""

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from metadist.errors import UserError

OmniglotSplit = Literal["random", "vinyals", "alphabets", "small1", "small2"]

TRAINING = 1200
"""Characters that are not for test in the splits "random" and "vinyals", …"""
HELD_OUT = 100
"""… of which in "random" these are for validation."""

VINYALS_VALIDATION = ("Armenian", "Bengali", "Early_Aramaic", "Hebrew", "Mkhedruli_(Georgian)")
"""Alphabets of the validation in "vinyals"."""

MINIMAL = {
    "small1": ("Balinese", "Early_Aramaic", "Greek", "Korean", "Latin"),
    "small2": ("Greek", "Japanese_(katakana)", "Latin", "Sanskrit", "Tagalog"),
}
"""The official minimal background sets: what `images_background_small1.zip` and its sibling hold,
the same images as in `images_background.zip`."""


def alphabet(name: str) -> str:
    """The alphabet of a character: `images_background/Latin` of `images_background/Latin/…`."""
    return name.rpartition("/")[0]


def divide(
    names: Sequence[str], split: str, seed: int, validation_alphabets: int
) -> dict[str, np.ndarray]:
    """The characters of each part, as indices into `names`.

    - "random": 1100, 100 and 423 random characters, as in MAML's code (arXiv 1703.03400).
    - "vinyals": 1028, 172 and 423 characters, mostly by whole alphabets: the lists of Vinyals et
      al. (2016, arXiv 1606.04080), as published with prototypical networks (arXiv 1703.05175).
      The first 1200 characters in the order of their names are for training, those of five
      alphabets among them for validation, the rest for test.
    - "alphabets": Lake et al.'s own (2015, doi 10.1126/science.aab3050). The 20 alphabets of the
      evaluation set are for test, those of the background set for training but for a few random
      ones for validation.
    - "small1", "small2": the same test; training on one of the two minimal background sets of
      five alphabets, validation on random ones of the other background alphabets. A choice
      that heeds the validation uses more than the minimal set.

    Args:
        names: those of all characters, such as `images_background/Latin/character01`, sorted.
        split: one of `OmniglotSplit`.
        seed: of what is random, not negative.
        validation_alphabets: how many alphabets are for validation in the last three.

    Returns:
        int64 indices for "train", "validation" and "test".

    Raises:
        UserError: no such split, or too many alphabets for validation.
    """
    if split not in get_args(OmniglotSplit):
        choices = ", ".join(get_args(OmniglotSplit))
        raise UserError(f"dataset.split={split} is none of Omniglot's splits: choose {choices}")
    if split == "random":
        order = np.random.default_rng(seed).permutation(len(names))
        bounds = (TRAINING - HELD_OUT, TRAINING)
        return dict(zip(("train", "validation", "test"), np.split(order, bounds), strict=True))
    if split == "vinyals":
        first = {name for name in names if alphabet(name) in _background(VINYALS_VALIDATION)}
        return _indices(names, set(names[TRAINING:]), first)
    background = sorted({alphabet(n) for n in names if n.startswith("images_background/")})
    training = _background(MINIMAL[split]) if split in MINIMAL else set(background)
    # Validation takes away from training, unless that is a set that others have fixed.
    free = [a for a in background if split == "alphabets" or a not in training]
    if not 1 <= validation_alphabets < len(free):
        raise UserError(
            f"dataset.validation_alphabets={validation_alphabets} does not fit: from 1 to "
            f"{len(free) - 1} alphabets can be held out with dataset.split={split}"
        )
    held = {
        free[i] for i in np.random.default_rng(seed).permutation(len(free))[:validation_alphabets]
    }
    test = {name for name in names if not name.startswith("images_background/")}
    unused = {n for n in names if alphabet(n) not in training | held} - test
    return _indices(names, test, {n for n in names if alphabet(n) in held}, unused)


def _background(alphabets: Sequence[str]) -> set[str]:
    return {f"images_background/{name}" for name in alphabets}


def _indices(
    names: Sequence[str], test: set[str], validation: set[str], unused: set[str] = frozenset()
) -> dict[str, np.ndarray]:
    parts: dict[str, list[int]] = {"train": [], "validation": [], "test": []}
    for index, name in enumerate(names):
        if name not in unused:
            part = "test" if name in test else "validation" if name in validation else "train"
            parts[part].append(index)
    return {part: np.array(members, dtype=np.int64) for part, members in parts.items()}
