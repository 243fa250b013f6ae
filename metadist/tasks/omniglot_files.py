"""Find, download and decode the files of Omniglot."""

import contextlib
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
from metadist.tasks.data_files import decode_image, root_errors, unreadable

CHARACTERS = {"images_background": 964, "images_evaluation": 659}
"""The two sets of Omniglot and their characters: 1623 in all."""

EXAMPLES = 20
"""Images per character, each drawn by another person."""

_MEMBER = re.compile(r"((images_[a-z]+)/[^/]+/character\d+)/[^/]+\.png")
MAX_MEMBER_BYTES = 1 << 20
MAX_IMAGE_PIXELS = 1 << 20
_FORMAT = 1
"""Part of the fingerprint; raise it when the same files are decoded to another array."""


def find(root: Path) -> dict[str, Path]:
    """The sets in `root` by name, each a folder or a zip file; a folder takes precedence.

    The sets may also be in the subfolder `omniglot-py`, where torchvision puts them.

    Raises:
        UserError: `root` is not a directory or cannot be read.
    """
    sources = {}
    with root_errors(root, "Omniglot"):
        for name in CHARACTERS:
            paths = [root / name, root / "omniglot-py" / name]
            paths += [path.with_name(f"{name}.zip") for path in paths]
            if existing := [path for path in paths if path.exists()]:
                sources[name] = existing[0]
    return sources


def download_advice(root: Path, missing: list[str]) -> str:
    """What a user can do if sets of Omniglot are missing."""
    files = " and ".join(f"{name}.zip" for name in missing)
    return (
        f"put {files} from https://github.com/brendenlake/omniglot/tree/master/python into {root}, "
        "or set dataset.root to the directory that has them"
    )


def download(root: Path, missing: list[str]) -> None:
    """Download the zip files of sets into `root`; URLs and digests are torchvision's.

    Raises:
        UserError: the download fails or `root` cannot be written to.
    """
    for name in missing:
        data_files.download(
            root / f"{name}.zip",
            functools.partial(_published, name),
            "Omniglot",
            download_advice(root, missing),
        )


def _published(name: str) -> tuple[str, str]:
    from torchvision.datasets import Omniglot

    return f"{Omniglot.download_url_prefix}/{name}.zip", Omniglot.zips_md5[name]


def fingerprint(sources: dict[str, Path], size: int) -> str:
    """16 hexadecimal digits that change with the files' names, sizes and times, and with `size`."""
    files = [
        (file.relative_to(source.parent).as_posix(), file)
        for _, source in sorted(sources.items())
        for file in ([source] if source.is_file() else _images_below(source))
    ]
    return data_files.fingerprint(files, _FORMAT, size)


def decode(sources: dict[str, Path], size: int) -> ArraySpec:
    """Decode all images of Omniglot.

    Args:
        sources: the folder or zip file of each set.
        size: height and width of the decoded images, in pixels.

    Returns:
        uint8 of shape (1623, 20, size, size), 0 for the background and 255 for strokes, one row
        per character, sorted by names like `images_background/Latin/character01`.

    Raises:
        UserError: a file cannot be read, or characters or images are missing.
    """
    names = []
    for set_name, source in sorted(sources.items()):
        with _members(set_name, source) as (characters, _):
            _check_complete(set_name, source, characters)
            names += sorted(characters)
    return ArraySpec((EXAMPLES, size, size), names, _rows(sources, size))


def _rows(sources: dict[str, Path], size: int) -> Iterator[np.ndarray]:
    for set_name, source in sorted(sources.items()):
        with _members(set_name, source) as (characters, read):
            for _, members in sorted(characters.items()):
                images = [
                    _decode_strokes(read(name), size, source, name) for name in sorted(members)
                ]
                yield np.stack(images)


@contextlib.contextmanager
def _members(
    set_name: str, source: Path
) -> Iterator[tuple[dict[str, list[str]], Callable[[str], bytes]]]:
    """The images of a set by character, and a function that reads one of them.

    Yields:
        {"set/alphabet/character": [member, …]}, and the function from a member to its bytes.
    """
    with contextlib.ExitStack() as stack:
        if source.is_dir():
            members = [path.relative_to(source.parent).as_posix() for path in _images_below(source)]

            def open_member(member: str) -> IO[bytes]:
                return open_regular(source.parent / member)
        else:
            try:
                archive = stack.enter_context(zipfile.ZipFile(source))
            except (zipfile.BadZipFile, OSError, NotImplementedError) as error:
                raise UserError(
                    f"{source} is not a readable zip file ({one_line(error)}); delete it and put "
                    "the complete file there."
                ) from error
            members = archive.namelist()

            def open_member(member: str) -> IO[bytes]:
                return archive.open(member)

        characters: dict[str, list[str]] = {}
        for member in members:
            # Members of an archive that are not images of this set are ignored.
            if (match := _MEMBER.fullmatch(member)) and match[2] == set_name:
                characters.setdefault(match[1], []).append(member)

        def read(member: str) -> bytes:
            try:
                with open_member(member) as file:
                    data = file.read(MAX_MEMBER_BYTES + 1)
            except (OSError, zipfile.BadZipFile, zlib.error, RuntimeError, EOFError) as error:
                raise UserError(
                    f"{member} in {source} cannot be read ({one_line(error)}); replace {source} "
                    "with a complete copy."
                ) from error
            if len(data) > MAX_MEMBER_BYTES:
                raise UserError(
                    f"{member} in {source} is larger than {MAX_MEMBER_BYTES >> 20} MiB, where "
                    f"images have some hundred bytes; replace {source} with a complete copy."
                )
            return data

        yield characters, read


def _images_below(folder: Path) -> Iterator[Path]:
    """Files `Alphabet/character/name.png` of a set's folder, sorted."""
    try:
        for alphabet in sorted(filter(Path.is_dir, folder.iterdir())):
            for character in sorted(filter(Path.is_dir, alphabet.iterdir())):
                with os.scandir(character) as entries:
                    names = sorted(e.name for e in entries if e.name.endswith(".png"))
                yield from (character / name for name in names)
    except OSError as error:
        raise UserError(unreadable(error.filename or folder, error)) from error


def _check_complete(set_name: str, source: Path, characters: dict[str, list[str]]) -> None:
    expected = CHARACTERS[set_name]
    if len(characters) != expected:
        raise UserError(
            f"{source} has {len(characters)} characters where Omniglot has {expected}, in files "
            f"like {set_name}/Alphabet/character01/NAME.png; replace it with a complete copy."
        )
    for character, members in sorted(characters.items()):
        if len(members) != EXAMPLES:
            raise UserError(
                f"{character} in {source} has {len(members)} images, expected "
                f"{EXAMPLES}; replace {source} with a complete copy."
            )


def _decode_strokes(data: bytes, size: int, source: Path, member: str) -> np.ndarray:
    """Decode one PNG, inverted: uint8 (size, size)."""
    try:
        return 255 - decode_image(data, "L", size, ("PNG",), MAX_IMAGE_PIXELS)
    except ValueError as error:
        raise UserError(
            f"{member} in {source} cannot be decoded as a PNG image ({error}); replace {source} "
            "with a complete copy."
        ) from error
