"""Find, download and decode the files of Omniglot."""

import functools
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import numpy as np

from metadist.errors import UserError, one_line
from metadist.files import open_regular
from metadist.tasks import data_files
from metadist.tasks.array_cache import ArraySpec
from metadist.tasks.data_files import decode_image, unreadable
from metadist.tasks.decoded_images import Source

CHECKSUMS = {
    "images_background": "md5:68d2efa1b9178cc56df9314c21c6e718",
    "images_evaluation": "md5:6b91aef0f799c5bb55b94e3f2daec811",
}
"""The checksums of the published zip files of the two sets."""

_PUBLISHED = "https://raw.githubusercontent.com/brendenlake/omniglot/master/python"
_MEMBER = re.compile(r"(images_[a-z]+)/[^/]+/character\d+/[^/]+\.png")
MAX_MEMBER_BYTES = 1 << 20
MAX_IMAGE_PIXELS = 1 << 20


def find(root: Path, download: bool) -> dict[str, Path]:
    """The sets in `root` by name, each a folder or a zip file; a folder takes precedence.

    The sets may also be in the subfolder `omniglot-py`, where torchvision puts them.

    Args:
        root: the directory.
        download: whether to download the zip files of sets that are missing.

    Raises:
        UserError: a set is missing, or the download fails.
    """
    sources = {}
    for name in CHECKSUMS:
        paths = [root / name, root / "omniglot-py" / name]
        paths += [path.with_name(f"{name}.zip") for path in paths]
        sources[name] = next(filter(Path.exists, paths), root / f"{name}.zip")
    missing = [name for name, path in sources.items() if not path.exists()]
    advice = (
        f"put {' and '.join(f'{name}.zip' for name in missing)} from "
        f"https://github.com/brendenlake/omniglot/tree/master/python into {root}, or set "
        "dataset.root to the directory that has them"
    )
    if missing and not download:
        raise UserError(
            f"{root} has no {' and '.join(missing)} of Omniglot, neither as a folder nor as a zip "
            f"file; {advice}, or leave out dataset.download=false."
        )
    for name in missing:
        url = f"{_PUBLISHED}/{name}.zip"
        data_files.download(sources[name], url, CHECKSUMS[name], advice)
    return sources


def source(sources: dict[str, Path], size: int) -> Source:
    """The source of the images in the folder or zip file of each set.

    Args:
        sources: the folder or zip file of each set.
        size: height and width of the decoded images, in pixels.
    """
    files = [
        named
        for path in sources.values()
        for named in ([(path.name, path)] if path.is_file() else _images_below(path))
    ]
    decoder = functools.partial(decode, sources, size)
    return Source(f"omniglot_{size}px", files, (size,), decoder, sources)


def decode(sources: dict[str, Path], size: int) -> ArraySpec:
    """Decode all images of Omniglot; see `source`.

    Returns:
        uint8 of shape (images, size, size), 0 for the background and 255 for strokes, sorted by
        names like `images_background/Latin/character01/0709_01.png`.

    Raises:
        UserError: a file cannot be read.
    """
    members = {
        name: (path, open_member)
        for set_name, path in sources.items()
        for name, open_member in _members(set_name, path).items()
    }
    rows = (_decode_strokes(name, *member, size) for name, member in members.items())
    return ArraySpec((size, size), list(members), rows)


def _members(set_name: str, source: Path) -> dict[str, Callable[[], IO[bytes]]]:
    """The images of a set, sorted by name, and the function that opens each."""
    opening: dict[str, Callable[[], IO[bytes]]]
    if source.is_dir():
        opening = {n: functools.partial(open_regular, path) for n, path in _images_below(source)}
    else:
        try:
            archive = zipfile.ZipFile(source)
        except (zipfile.BadZipFile, OSError, NotImplementedError) as error:
            raise UserError(
                f"{source} is not a readable zip file ({one_line(error)}); delete it and put "
                "the complete file there."
            ) from error
        opening = {name: functools.partial(archive.open, name) for name in archive.namelist()}
    # Members of an archive that are not images of this set are ignored.
    return {
        name: opening[name]
        for name in sorted(opening)
        if (match := _MEMBER.fullmatch(name)) and match[1] == set_name
    }


def _images_below(folder: Path) -> Iterator[tuple[str, Path]]:
    """The names `SET/Alphabet/character/name.png` and paths of the images of a set, sorted."""
    try:
        for alphabet in sorted(filter(Path.is_dir, folder.iterdir())):
            for character in sorted(filter(Path.is_dir, alphabet.iterdir())):
                with os.scandir(character) as entries:
                    names = sorted(e.name for e in entries if e.name.endswith(".png"))
                # Joined here, because `Path.relative_to` takes longer than the scan.
                prefix = f"{folder.name}/{alphabet.name}/{character.name}"
                yield from ((f"{prefix}/{name}", character / name) for name in names)
    except OSError as error:
        raise UserError(unreadable(error.filename or folder, error)) from error


def _decode_strokes(
    member: str, source: Path, open_member: Callable[[], IO[bytes]], size: int
) -> np.ndarray:
    """Decode one PNG, inverted: uint8 (size, size)."""
    try:
        with open_member() as file:
            data = file.read(MAX_MEMBER_BYTES + 1)
    except (OSError, zipfile.BadZipFile, zlib.error, RuntimeError, EOFError) as error:
        raise UserError(
            f"{member} in {source} cannot be read ({one_line(error)}); replace {source} with a "
            "complete copy."
        ) from error
    if len(data) > MAX_MEMBER_BYTES:
        raise UserError(
            f"{member} in {source} is larger than {MAX_MEMBER_BYTES >> 20} MiB, where images have "
            f"some hundred bytes; replace {source} with a complete copy."
        )
    try:
        return 255 - decode_image(data, "L", size, ("PNG",), MAX_IMAGE_PIXELS)
    except ValueError as error:
        raise UserError(
            f"{member} in {source} cannot be decoded as a PNG image ({error}); replace {source} "
            "with a complete copy."
        ) from error
