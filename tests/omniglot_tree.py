"""Small synthetic Omniglots, checks of datasets, and the path of the real Omniglot."""

import io
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw

from metadist.errors import UserError
from metadist.tasks import SPLITS
from metadist.tasks.decoded_images import Counts

SMALL = {"images_background": 4, "images_evaluation": 3}
SMALL_COUNTS = {name: Counts(classes, examples=20) for name, classes in SMALL.items()}
REAL = Path(__file__).parents[2] / "shared" / "data" / "omniglot"

ALPHABETS = {
    "images_background": {
        "Alphabet_of_the_Magi": 20,
        "Anglo-Saxon_Futhorc": 29,
        "Arcadian": 26,
        "Armenian": 41,
        "Asomtavruli_(Georgian)": 40,
        "Balinese": 24,
        "Bengali": 46,
        "Blackfoot_(Canadian_Aboriginal_Syllabics)": 14,
        "Braille": 26,
        "Burmese_(Myanmar)": 34,
        "Cyrillic": 33,
        "Early_Aramaic": 22,
        "Futurama": 26,
        "Grantha": 43,
        "Greek": 24,
        "Gujarati": 48,
        "Hebrew": 22,
        "Inuktitut_(Canadian_Aboriginal_Syllabics)": 16,
        "Japanese_(hiragana)": 52,
        "Japanese_(katakana)": 47,
        "Korean": 40,
        "Latin": 26,
        "Malay_(Jawi_-_Arabic)": 40,
        "Mkhedruli_(Georgian)": 41,
        "N_Ko": 33,
        "Ojibwe_(Canadian_Aboriginal_Syllabics)": 14,
        "Sanskrit": 42,
        "Syriac_(Estrangelo)": 23,
        "Tagalog": 17,
        "Tifinagh": 55,
    },
    "images_evaluation": {
        "Angelic": 20,
        "Atemayar_Qelisayer": 26,
        "Atlantean": 26,
        "Aurek-Besh": 26,
        "Avesta": 26,
        "Ge_ez": 26,
        "Glagolitic": 45,
        "Gurmukhi": 45,
        "Kannada": 41,
        "Keble": 26,
        "Malayalam": 47,
        "Manipuri": 40,
        "Mongolian": 30,
        "Old_Church_Slavonic_(Cyrillic)": 45,
        "Oriya": 46,
        "Sylheti": 28,
        "Syriac_(Serto)": 23,
        "Tengwar": 25,
        "Tibetan": 42,
        "ULOG": 26,
    },
}
"""Omniglot's alphabets and how many characters each has."""

MINIMAL = {
    "images_background_small1": ("Balinese", "Early_Aramaic", "Greek", "Korean", "Latin"),
    "images_background_small2": ("Greek", "Japanese_(katakana)", "Latin", "Sanskrit", "Tagalog"),
}
"""The alphabets of the minimal background sets."""


def character_names() -> list[str]:
    """All 1623 characters, sorted, such as `images_background/Latin/character01`."""
    return sorted(
        f"{part}/{alphabet}/character{number:02d}"
        for part, alphabets in ALPHABETS.items()
        for alphabet, count in alphabets.items()
        for number in range(1, count + 1)
    )


def write_whole(root: Path, examples: int) -> Path:
    """Zip files of every character of Omniglot in its layout, with so many generated images."""
    parts: dict[str, dict[str, bytes]] = {}
    for index, name in enumerate(character_names(), 1):
        part, alphabet, character = name.split("/")
        random = np.random.default_rng(index)
        strokes = random.integers(5, 100, size=(4, 2))
        for example in range(1, examples + 1):
            image = Image.new("1", (105, 105), 1)
            points = [tuple(p) for p in (strokes + random.integers(-4, 5, size=(4, 2))).tolist()]
            ImageDraw.Draw(image).line(points, fill=0, width=3)
            data = io.BytesIO()
            image.save(data, "PNG")
            file = f"{alphabet}/{character}/{index:04d}_{example:02d}.png"
            parts.setdefault(part, {})[f"{part}/{file}"] = data.getvalue()
            for small, alphabets in MINIMAL.items():
                if part == "images_background" and alphabet in alphabets:
                    parts.setdefault(small, {})[f"{small}/{file}"] = data.getvalue()
    root.mkdir(parents=True, exist_ok=True)
    for part, members in parts.items():
        write_zip(root / f"{part}.zip", members)
    return root


def png(character: int, example: int) -> bytes:
    """A bilevel image like those of Omniglot: black strokes on white, 105 by 105."""
    image = Image.new("1", (105, 105), 1)
    pen = ImageDraw.Draw(image)
    pen.line((10 + example, 10, 90, 20 + 10 * character), fill=0, width=3)
    pen.arc((20, 20, 40 + 8 * character, 80 + example), 0, 270, fill=0, width=3)
    data = io.BytesIO()
    image.save(data, "PNG")
    return data.getvalue()


def images(set_name: str) -> dict[str, bytes]:
    """The members of a small set by name; unsorted, two alphabets."""
    return {
        f"{set_name}/{'Zeta' if character % 2 else 'Alpha'}/character{character:02d}/"
        f"{character:04d}_{example:02d}.png": png(character, example)
        for character in range(SMALL[set_name], 0, -1)
        for example in range(20, 0, -1)
    }


def write_zip(path: Path, members: dict[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def write_zips(root: Path) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for name in SMALL:
        write_zip(root / f"{name}.zip", images(name))
    return root


def write_folders(root: Path) -> Path:
    for name in SMALL:
        for member, data in images(name).items():
            (root / member).parent.mkdir(parents=True, exist_ok=True)
            (root / member).write_bytes(data)
    return root


def ink(data: bytes, size: int) -> np.ndarray:
    """An image decoded on its own, by other means than the package's."""
    with Image.open(io.BytesIO(data)) as image:
        grey = Image.fromarray(np.array(image).astype(np.uint8) * 255)
    return 255 - np.array(grey.resize((size, size), Image.LANCZOS))


def by_name(dataset) -> dict[str, np.ndarray]:
    """Each character's images by its name, from all splits."""
    return {
        name: pixels.copy()  # not a view of a file that a test may go on to harm
        for split in SPLITS
        for name, pixels in zip(
            dataset.characters[split], dataset.split_classes(split), strict=True
        )
    }


def refused(build: Callable[[], object], *parts: object) -> None:
    """`build`, which builds a dataset, raises a `UserError` of one line that has all `parts`."""
    with pytest.raises(UserError) as error:
        build()
    message = str(error.value)
    assert "\n" not in message, message
    assert len(message) < 900, message
    assert all(str(part) in message for part in parts), message
