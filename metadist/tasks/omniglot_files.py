"""The files of Omniglot: where they may lie, how they are fetched, and how they are read."""

import contextlib
import hashlib
import io
import os
import re
import socket
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from metadist.errors import UserError
from metadist.tasks.array_cache import NamedArray, locked

CHARACTERS = {"images_background": 964, "images_evaluation": 659}
"""The two sets of Omniglot and their characters: 1623 in all."""

EXAMPLES = 20
"""Images a character, each drawn by another person."""

_MEMBER = re.compile(r"(images_[a-z]+)/([^/]+)/(character\d+)/([^/]+\.png)")
_MEMBER_BYTES = 1 << 20
_IMAGE_SIDE = 1024
_SILENCE_SECONDS = 30.0
_FORMAT = 1
"""Part of the digest; to be raised when the same files shall give another array."""


def find(root: Path) -> dict[str, Path]:
    """The sets that lie in `root`, each a folder or a zip file; the folder comes first.

    The subfolder `omniglot-py`, where torchvision puts them, counts as well.

    Raises:
        UserError: `root` is not a directory or cannot be read.
    """
    if root.exists() and not root.is_dir():
        raise UserError(f"dataset.root is {root}, which is a file; give the directory of Omniglot")
    found = {}
    for name in CHARACTERS:
        places = [root / name, root / "omniglot-py" / name]
        places += [place.with_name(f"{name}.zip") for place in places]
        try:
            existing = [place for place in places if place.exists()]
        except OSError as error:
            raise UserError(
                f"dataset.root {root} cannot be read ({error.strerror}); allow it, or give "
                "another directory"
            ) from error
        if existing:
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
    """Fetch the zip files of sets into `root`: by one process, while others wait for it.

    Addresses and check sums are torchvision's. A file takes its name only when it is complete.

    Raises:
        UserError: the download fails or `root` cannot be written to.
    """
    advice = where_to_get(root, missing)
    with locked(root / "omniglot_download", advice):
        for name in missing:
            target = root / f"{name}.zip"
            if target.exists():
                continue
            part = target.with_name(f".{target.name}.part")
            try:
                with _bounded_silence():
                    # Late: importing torchvision takes a second, and is needed for nothing else.
                    from torchvision.datasets import Omniglot
                    from torchvision.datasets.utils import download_url

                    url = f"{Omniglot.download_url_prefix}/{name}.zip"
                    download_url(url, str(root), part.name, Omniglot.zips_md5[name])
                part.replace(target)
            except Exception as error:  # whatever a network, its proxies and torchvision raise
                part.unlink(missing_ok=True)
                raise UserError(
                    f"{name}.zip of Omniglot is not in {root} and could not be downloaded "
                    f"({_short(error)}); {advice}"
                ) from error


def digest(sources: dict[str, Path], size: int) -> str:
    """16 hexadecimal digits that change with the files' names, sizes and times, and with `size`."""
    about = hashlib.blake2b(repr((_FORMAT, size)).encode(), digest_size=8)
    for name, source in sorted(sources.items()):
        files = [source] if source.is_file() else list(_images_below(source))
        for file in files:
            try:
                status = file.stat()
            except OSError as error:
                raise UserError(_unreadable(file, error)) from error
            key = (file.relative_to(source.parent).as_posix(), status.st_size, status.st_mtime_ns)
            about.update(repr((name, key)).encode())
    return about.hexdigest()


def decode(sources: dict[str, Path], size: int) -> NamedArray:
    """Every image of Omniglot, once.

    Args:
        sources: the folder or zip file of each set.
        size: height and width to shrink the images to, in pixels.

    Returns:
        uint8 of shape (1623, 20, size, size), 255 = full ink, with names like
        `images_background/Latin/character01`, in the order of these names.

    Raises:
        UserError: a file cannot be read, or characters or images are missing.
    """
    names: list[str] = []
    array = np.empty((sum(CHARACTERS.values()), EXAMPLES, size, size), dtype=np.uint8)
    for set_name, source in sorted(sources.items()):
        with _members(set_name, source) as (characters, read):
            _check_complete(set_name, source, characters)
            for character, members in sorted(characters.items()):
                for example, member in enumerate(sorted(members)):
                    array[len(names), example] = _decode_image(read(member), size, source, member)
                names.append("/".join(character))
    return NamedArray(array, names)


@contextlib.contextmanager
def _members(set_name: str, source: Path) -> Iterator:
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
                    f"{source} is not a readable zip file ({_short(error)}); delete it and put "
                    "the complete file there"
                ) from error
            members, opened = archive.namelist(), archive.open

        characters: dict[tuple[str, ...], list[str]] = {}
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
                    f"{member} in {source} cannot be read ({_short(error)}); replace {source} by "
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
        raise UserError(_unreadable(error.filename or folder, error)) from error


def _check_complete(set_name: str, source: Path, characters: dict) -> None:
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


def _decode_image(data: bytes, size: int, source: Path, member: str) -> np.ndarray:
    """One PNG as ink: uint8 (size, size). MAML's images were resized with Lanczos' filter too."""
    try:
        with Image.open(io.BytesIO(data), formats=("PNG",)) as image:
            if max(image.size) > _IMAGE_SIDE:
                raise ValueError(f"{image.width} x {image.height} pixels")
            grey = image.convert("L").resize((size, size), Image.Resampling.LANCZOS)
    # Pillow raises these on damaged files, SyntaxError included.
    except (OSError, ValueError, SyntaxError, zlib.error, Image.DecompressionBombError) as error:
        raise UserError(
            f"{member} in {source} cannot be decoded as a PNG image ({_short(error)}); replace "
            f"{source} by a complete copy"
        ) from error
    return 255 - np.asarray(grey)


@contextlib.contextmanager
def _bounded_silence() -> Iterator[None]:
    """No progress bar from a rank that may not be the first, and no wait for a mute server."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_SILENCE_SECONDS)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        socket.setdefaulttimeout(before)


def _unreadable(path: Path | str, error: OSError) -> str:
    return f"{path} cannot be read ({error.strerror}); allow it, or put another copy there"


def _short(error: BaseException) -> str:
    """An error's message in one line of bounded length."""
    return " ".join(str(error).split())[:200] or type(error).__name__
