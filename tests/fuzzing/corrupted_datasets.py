"""Corrupted archives, images and caches of a dataset."""

import io
import itertools
import random
import shutil
import zipfile
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from fuzzing.case import SMALL, Case
from fuzzing.corruption import (
    PARTIAL,
    REPLACEMENTS,
    Corruption,
    huge_png,
    png_header_flipped,
    png_truncated,
    truncated,
    untouched,
)
from metadist.tasks import array_cache, omniglot_files

_SET, _OTHER = "images_background", "images_evaluation"
_CHARACTERS, _OTHER_CHARACTERS, _EXAMPLES = 964, 659, 20
_FIRST = 2  # number of characters of the alphabet that is read first
_ALPHABET_SIZE = 40
_LAST_ALPHABET = f"Alphabet{(_CHARACTERS - _FIRST) // _ALPHABET_SIZE:02d}"  # has fewer
_EARLY = f"{_SET}/Aaa/character01/0001_01.png"  # the image that is read first


def corrupted_datasets(scratch: Path, rng: random.Random) -> list[Case]:
    """Cases of a generated dataset in Omniglot's layout and size, each with one defect."""
    intact = _IntactFiles(scratch, rng)
    cases: list[Case] = []

    def add(kind: str, name: str, corruption: Callable[[Path], object]) -> None:
        root = scratch / f"dataset-{len(cases)}"

        def prepare() -> None:
            # The set that is read last; the error occurs before it is read.
            root.mkdir()
            with zipfile.ZipFile(root / f"{_OTHER}.zip", "w"):
                pass
            corruption(root)

        small = [each for each in SMALL if not each.startswith("++dataset.")]
        omniglot = ("dataset=omniglot", "++dataset.download=false", f"dataset.root={root}")
        arguments = (*small, *omniglot, f"hydra.run.dir={root}/run")
        cases.append(Case(kind, name, arguments, (str(root),), prepare=prepare, folder=root))

    for name, change in _archive_changes(rng):
        add("archive", name, partial(_changed_archive, intact=intact, change=change))
    for name, touch in _image_changes(rng):
        add("image", name, partial(_changed_image, intact=intact, touch=touch))
    for number in range(24):
        corruption = (*PARTIAL[:3], *REPLACEMENTS)[number % 7]
        kind = "npy" if number % 3 else "json"
        how = partial(corruption, rng=random.Random(rng.random()))
        change = partial(_changed_cache, intact=intact, kind=kind, corruption=how)
        add("cache", f".{kind} {corruption.__name__}", change)
    add(
        "intact cache", "", partial(_changed_cache, intact=intact, kind="npy", corruption=untouched)
    )
    cases[-1] = cases[-1]._replace(recovers=True)
    return cases


class _IntactFiles:
    """The intact files, created on first use."""

    def __init__(self, scratch: Path, rng: random.Random) -> None:
        self._scratch = scratch
        self._seed = rng.random()

    @cached_property
    def images(self) -> dict[str, bytes]:
        """All images by file name, those of the first alphabet first."""
        return _images(random.Random(self._seed))

    @cached_property
    def archive(self) -> bytes:
        """All images in a zip file."""
        return _zipped(self.images)

    @cached_property
    def folder(self) -> Path:
        """All images unpacked; alphabets of equal size are symbolic links to one folder."""
        folder = self._scratch / "intact-images" / _SET
        for name, data in self.images.items():
            alphabet, character, file = name.split("/")[1:]
            if alphabet in ("Aaa", "Alphabet00", _LAST_ALPHABET):
                (folder / alphabet / character).mkdir(parents=True, exist_ok=True)
                (folder / alphabet / character / file).write_bytes(data)
        for alphabet in {name.split("/")[1] for name in self.images}:
            if not (folder / alphabet).exists():
                (folder / alphabet).symlink_to("Alphabet00")
        return folder

    @cached_property
    def cache(self) -> dict[str, bytes]:
        """The cache of decoded images, by file suffix."""
        names = [f"{_SET}/Alphabet/character{i}/{e}" for i in range(1623) for e in range(_EXAMPLES)]
        rows = np.zeros((_EXAMPLES, 28, 28), np.uint8)
        rows[:, 10:18, 10:18] = np.arange(_EXAMPLES)[:, None, None]
        folder = self._scratch / "intact-cache"
        folder.mkdir()
        path = array_cache.cache_directory(folder) / "omniglot_28px_0.npy"
        spec = array_cache.ArraySpec((28, 28), names, itertools.chain(*[rows] * 1623))
        array_cache.load_or_create(folder, path.name, lambda: spec)
        return {suffix: path.with_suffix(f".{suffix}").read_bytes() for suffix in ("npy", "json")}


def _changed_archive(
    root: Path, intact: _IntactFiles, change: Callable[[_IntactFiles], bytes]
) -> None:
    (root / f"{_SET}.zip").write_bytes(change(intact))


def _changed_image(root: Path, intact: _IntactFiles, touch: Callable[[Path], object]) -> None:
    _linked(intact.folder, root / _SET)
    other, alphabet = root / _OTHER, intact.folder / "Alphabet00"  # as large as Omniglot's
    rest = other / "Rest"
    rest.mkdir(parents=True)
    whole, left = divmod(_OTHER_CHARACTERS, _ALPHABET_SIZE)
    for number in range(whole):
        (other / f"Alphabet{number:02d}").symlink_to(alphabet)
    for character in sorted(alphabet.iterdir())[:left]:
        (rest / character.name).symlink_to(character)
    touch(root / _EARLY)


def _changed_cache(
    root: Path, intact: _IntactFiles, kind: str, corruption: Callable[[bytes], bytes]
) -> None:
    with zipfile.ZipFile(root / f"{_SET}.zip", "w"):
        pass
    path = root / omniglot_files.source(omniglot_files.find(root, download=False), 28).cache_name
    for suffix, data in intact.cache.items():
        content = corruption(data) if suffix == kind else data
        path.with_suffix(f".{suffix}").write_bytes(content)


def _images(rng: random.Random) -> dict[str, bytes]:
    pngs = []
    for _ in range(40):
        image = Image.new("1", (105, 105), 1)
        pen = ImageDraw.Draw(image)
        for _ in range(3):
            pen.line([rng.randrange(105) for _ in range(6)], fill=0, width=3)
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        pngs.append(buffer.getvalue())
    names = [f"{_SET}/Aaa/character{i + 1:02d}/{i + 1:04d}" for i in range(_FIRST)]
    names += [
        f"{_SET}/Alphabet{i // _ALPHABET_SIZE:02d}/character{i % _ALPHABET_SIZE + 1:02d}/{i:04d}"
        for i in range(_CHARACTERS - _FIRST)
    ]
    return {
        f"{name}_{example + 1:02d}.png": pngs[(index + example) % len(pngs)]
        for index, name in enumerate(names)
        for example in range(_EXAMPLES)
    }


def _archive_changes(rng: random.Random) -> Iterator[tuple[str, Callable[[_IntactFiles], bytes]]]:
    def corrupted(corruption: Corruption) -> Callable[[_IntactFiles], bytes]:
        own = random.Random(rng.random())
        return lambda intact: corruption(intact.archive, own)

    for corruption in [truncated] * 14 + [*REPLACEMENTS] * 2:
        yield corruption.__name__, corrupted(corruption)
    for _ in range(8):
        yield "an image's bit flipped", corrupted(_image_flipped)
    for field in (16, 24, 42, 20, 10):  # CRC, sizes, offset, method of the first entry
        yield "its directory's entry changed", partial(_entry_changed, field=field)
    for name in ("images_background/Aaa/character01/0001_0x.PNG", "../" * 20, "/" * 80, "\0" * 80):
        yield "an image under another path", partial(_renamed, name=name)
    huge = huge_png(b"", rng)
    for content in (bytes(50_000_000), b"", b"no image", huge):
        name = f"an image of {len(content)} bytes"
        yield name, lambda intact, content=content: _zipped({**intact.images, _EARLY: content})


def _image_flipped(data: bytes, rng: random.Random) -> bytes:
    """A byte changed in the compressed data of one of the first images."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        member = archive.infolist()[rng.randrange(_FIRST * _EXAMPLES)]
    start = member.header_offset + 30 + len(member.filename)
    return _xor(data, start + rng.randrange(member.compress_size), rng.randrange(1, 256))


def _entry_changed(intact: _IntactFiles, field: int) -> bytes:
    with zipfile.ZipFile(io.BytesIO(intact.archive)) as archive:
        return _xor(intact.archive, archive.start_dir + field, 0x5A)


def _renamed(intact: _IntactFiles, name: str) -> bytes:
    """The first image renamed in the archive's central directory, with the same length."""
    data = intact.archive
    offset = data.rindex(_EARLY.encode())
    other = name[: len(_EARLY)].ljust(len(_EARLY), "x").encode()
    return data[:offset] + other + data[offset + len(other) :]


def _xor(data: bytes, offset: int, mask: int) -> bytes:
    return data[:offset] + bytes([data[offset] ^ mask]) + data[offset + 1 :]


def _zipped(images: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        for name, data in images.items():
            file.writestr(name, data)
    return buffer.getvalue()


def _linked(intact: Path, folder: Path) -> None:
    """A folder that links to the alphabets of another one, except the first, which is copied."""
    folder.mkdir()
    for alphabet in intact.iterdir():
        if alphabet.name == "Aaa":
            shutil.copytree(alphabet, folder / "Aaa")
        else:
            (folder / alphabet.name).symlink_to(alphabet)


def _image_changes(rng: random.Random) -> Iterator[tuple[str, Callable[[Path], object]]]:
    corruptions = (
        [png_truncated] * 5 + [png_header_flipped] * 5 + [huge_png] * 3 + [*REPLACEMENTS] * 2
    )
    for corruption in corruptions:
        own = random.Random(rng.random())
        yield corruption.__name__, partial(_corruption, corruption=corruption, rng=own)
    yield "missing", Path.unlink
    yield "one too many", lambda path: shutil.copy(path, path.with_name("0001_99.png"))
    yield "a folder", lambda path: (path.unlink(), path.mkdir())
    yield "a link to nowhere", lambda path: (path.unlink(), path.symlink_to("nowhere"))
    yield "a character missing", lambda path: shutil.rmtree(path.parent)


def _corruption(path: Path, corruption: Corruption, rng: random.Random) -> None:
    path.write_bytes(corruption(path.read_bytes(), rng))
