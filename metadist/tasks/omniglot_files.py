"""The files of Omniglot: where they may lie, how they are fetched, and how they are read."""

import contextlib
import functools
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from metadist.errors import UserError
from metadist.tasks import data_files, downloads, image_files
from metadist.tasks.array_cache import Making
from metadist.tasks.data_files import looking_into, one_line, unreadable

CHARACTERS = {"images_background": 964, "images_evaluation": 659}
"""The two sets of Omniglot and their characters: 1623 in all."""

EXAMPLES = 20
"""Images a character, each drawn by another person."""

_MEMBER = re.compile(r"(images_[a-z]+)/([^/]+)/(character\d+)/([^/]+\.png)")
_MEMBER_BYTES = 1 << 20
_IMAGE_PIXELS = 1 << 20
_FORMAT = 1
"""Part of the digest; to be raised when the same files shall give another array."""


def find(root: Path) -> dict[str, Path]:
    """The sets that lie in `root`, each a folder or a zip file; the folder comes first.

    The subfolder `omniglot-py`, where torchvision puts them, counts as well.

    Raises:
        UserError: `root` is not a directory or cannot be read.
    """
    found = {}
    with looking_into(root, "Omniglot"):
        for name in CHARACTERS:
            places = [root / name, root / "omniglot-py" / name]
            places += [place.with_name(f"{name}.zip") for place in places]
            if existing := [place for place in places if place.exists()]:
                found[name] = existing[0]
    return found


def where_to_get(root: Path, missing: list[str]) -> str:
    """What a user can do who lacks sets of Omniglot."""
    files = " and ".join(f"{name}.zip" for name in missing)
    return (
        f"put {files} from https://github.com/brendenlake/omniglot/tree/master/python into {root}, "
        "or set dataset.root to the directory that has them"
    )


def download(root: Path, missing: list[str]) -> None:
    """Fetch the zip files of sets into `root`; addresses and check sums are torchvision's.

    Raises:
        UserError: the download fails or `root` cannot be written to.
    """
    for name in missing:
        downloads.download(
            root / f"{name}.zip",
            functools.partial(_published, name),
            "Omniglot",
            where_to_get(root, missing),
        )


def _published(name: str) -> tuple[str, str]:
    from torchvision.datasets import Omniglot

    return f"{Omniglot.download_url_prefix}/{name}.zip", Omniglot.zips_md5[name]


def digest(sources: dict[str, Path], size: int) -> str:
    """16 hexadecimal digits that change with the files' names, sizes and times, and with `size`."""
    files = (
        (file.relative_to(source.parent).as_posix(), file)
        for _, source in sorted(sources.items())
        for file in ([source] if source.is_file() else _images_below(source))
    )
    return data_files.digest(files, _FORMAT, size)


def decode(sources: dict[str, Path], size: int) -> Making:
    """Every image of Omniglot, once.

    Args:
        sources: the folder or zip file of each set.
        size: height and width to shrink the images to, in pixels.

    Returns:
        uint8 of shape (1623, 20, size, size), 255 = full ink, a character a row, with names like
        `images_background/Latin/character01`, in the order of these names.

    Raises:
        UserError: a file cannot be read, or characters or images are missing.
    """
    names = []
    for set_name, source in sorted(sources.items()):
        with _members(set_name, source) as (characters, _):
            _check_complete(set_name, source, characters)
            names += ["/".join(character) for character in sorted(characters)]
    return Making((EXAMPLES, size, size), names, _rows(sources, size))


def _rows(sources: dict[str, Path], size: int) -> Iterator[np.ndarray]:
    for set_name, source in sorted(sources.items()):
        with _members(set_name, source) as (characters, read):
            for _, members in sorted(characters.items()):
                yield np.stack([_ink(read(m), size, source, m) for m in sorted(members)])


_Characters = dict[tuple[str, ...], list[str]]


@contextlib.contextmanager
def _members(set_name: str, source: Path) -> Iterator[tuple[_Characters, Callable[[str], bytes]]]:
    """The images of a set by character, and the function that reads one of them.

    Yields:
        {(set, alphabet, character): [member, …]}, and member -> bytes.
    """
    with contextlib.ExitStack() as stack:
        if source.is_dir():
            members = [f.relative_to(source.parent).as_posix() for f in _images_below(source)]

            def opened(member: str):
                return (source.parent / member).open("rb")
        else:
            try:
                archive = stack.enter_context(zipfile.ZipFile(source))
            except (zipfile.BadZipFile, OSError) as error:
                raise UserError(
                    f"{source} is not a readable zip file ({one_line(error)}); delete it and put "
                    "the complete file there"
                ) from error
            members, opened = archive.namelist(), archive.open

        characters: _Characters = {}
        for member in members:
            # An archive may hold anything: whatever is not an image of this set is left alone.
            if (match := _MEMBER.fullmatch(member)) and match[1] == set_name:
                characters.setdefault(match.groups()[:3], []).append(member)

        def read(member: str) -> bytes:
            try:
                with opened(member) as file:
                    data = file.read(_MEMBER_BYTES + 1)
            except (OSError, zipfile.BadZipFile, zlib.error, RuntimeError, EOFError) as error:
                raise UserError(
                    f"{member} in {source} cannot be read ({one_line(error)}); replace {source} by "
                    "a complete copy"
                ) from error
            if len(data) > _MEMBER_BYTES:
                raise UserError(
                    f"{member} in {source} is larger than {_MEMBER_BYTES >> 20} MiB, where images "
                    f"have some hundred bytes; replace {source} by a complete copy"
                )
            return data

        yield characters, read


def _images_below(folder: Path) -> Iterator[Path]:
    """Files `Alphabet/character/name.png` of a set's folder, in the order of their names."""
    try:
        for alphabet in sorted(filter(Path.is_dir, folder.iterdir())):
            for character in sorted(filter(Path.is_dir, alphabet.iterdir())):
                with os.scandir(character) as entries:
                    names = sorted(e.name for e in entries if e.name.endswith(".png"))
                yield from (character / name for name in names)
    except OSError as error:
        raise UserError(unreadable(error.filename or folder, error)) from error


def _check_complete(set_name: str, source: Path, characters: _Characters) -> None:
    expected = CHARACTERS[set_name]
    if len(characters) != expected:
        raise UserError(
            f"{source} has {len(characters)} characters where Omniglot has {expected}, in files "
            f"like {set_name}/Alphabet/character01/NAME.png; replace it by a complete copy"
        )
    for character, members in sorted(characters.items()):
        if len(members) != EXAMPLES:
            raise UserError(
                f"{'/'.join(character)} in {source} has {len(members)} images, expected "
                f"{EXAMPLES}; replace {source} by a complete copy"
            )


def _ink(data: bytes, size: int, source: Path, member: str) -> np.ndarray:
    """One PNG as ink: uint8 (size, size)."""
    try:
        return 255 - image_files.decode_image(data, "L", size, ("PNG",), _IMAGE_PIXELS)
    except ValueError as error:
        raise UserError(
            f"{member} in {source} cannot be decoded as a PNG image ({error}); replace {source} "
            "by a complete copy"
        ) from error
