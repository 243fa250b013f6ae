"""A small synthetic Omniglot, checks of it, and the path of the real one."""

import io
import zipfile
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from metadist.tasks import SPLITS

SMALL = {"images_background": 4, "images_evaluation": 3}
REAL = Path(__file__).parents[3] / "shared" / "data" / "omniglot"


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


def one_line(error, *parts) -> None:
    """The error is one line that has these words."""
    message = str(error.value)
    assert "\n" not in message, message
    assert len(message) < 900, message
    assert all(str(part) in message for part in parts), message
