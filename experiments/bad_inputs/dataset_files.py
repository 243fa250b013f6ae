"""Damaged archives, images and caches of a dataset."""

import io
import random
import shutil
import zipfile
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from bad_inputs.cases import SMALL, Case
from bad_inputs.damage import (
    ANYWHERE,
    REPLACED,
    Damage,
    huge_png,
    png_cut,
    png_header_flipped,
    truncated,
    untouched,
)
from metadist.tasks import array_cache

_SET, _OTHER = "images_background", "images_evaluation"
_CHARACTERS, _EXAMPLES = 964, 20
_FIRST = 2  # characters of the alphabet that is read first
_OF_AN_ALPHABET = 40
_LAST_ALPHABET = f"Alphabet{(_CHARACTERS - _FIRST) // _OF_AN_ALPHABET:02d}"  # with fewer
_EARLY = f"{_SET}/Aaa/character01/0001_01.png"  # the image that is read first


def damaged_datasets(scratch: Path, draw: random.Random) -> list[Case]:
    """Cases of a made-up Omniglot of full size, each with one thing wrong with it."""
    good = _Good(scratch, draw)
    cases: list[Case] = []

    def add(kind: str, name: str, damage: Callable[[Path], object]) -> None:
        root = scratch / f"dataset-{len(cases)}"

        def prepare() -> None:
            # The set that is read last, which nobody comes to.
            root.mkdir()
            with zipfile.ZipFile(root / f"{_OTHER}.zip", "w"):
                pass
            damage(root)

        small = [word for word in SMALL if not word.startswith("++dataset.")]
        omniglot = ("dataset=omniglot", "++dataset.download=false", f"dataset.root={root}")
        words = (*small, *omniglot, f"hydra.run.dir={root}/run")
        cases.append(Case(kind, name, words, (str(root),), prepare=prepare, folder=root))

    for name, change in _archive_changes(draw):
        add("archive", name, partial(_changed_archive, good=good, change=change))
    for name, touch in _image_changes(draw):
        add("image", name, partial(_changed_image, good=good, touch=touch))
    for number in range(24):
        damage = (*ANYWHERE[:3], *REPLACED)[number % 7]
        kind = "npy" if number % 3 else "json"
        how = partial(damage, draw=random.Random(draw.random()))
        change = partial(_changed_cache, good=good, kind=kind, damage=how)
        add("cache", f".{kind} {damage.__name__}", change)
    add("undamaged cache", "", partial(_changed_cache, good=good, kind="npy", damage=untouched))
    cases[-1] = cases[-1]._replace(recovers=True)
    return cases


class _Good:
    """The undamaged files, each made when the first case asks for it."""

    def __init__(self, scratch: Path, draw: random.Random) -> None:
        self._scratch = scratch
        self._seed = draw.random()

    @cached_property
    def images(self) -> dict[str, bytes]:
        """Every image by its name, those of the first alphabet first."""
        return _images(random.Random(self._seed))

    @cached_property
    def archive(self) -> bytes:
        """All of them in a zip file."""
        return _zipped(self.images)

    @cached_property
    def folder(self) -> Path:
        """As many unpacked; alphabets of one size are one, under many names."""
        folder = self._scratch / "good-images" / _SET
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
        """Decoded images as the program keeps them, by suffix."""
        names = [f"{_SET}/Alphabet/character{i}" for i in range(1623)]
        row = np.zeros((_EXAMPLES, 28, 28), np.uint8)
        row[:, 10:18, 10:18] = np.arange(_EXAMPLES)[:, None, None]
        folder = self._scratch / "good-cache"
        folder.mkdir()
        path = array_cache.cache_directory(folder) / "omniglot_28px_0.npy"
        array_cache.load_or_create(
            folder, path.name, lambda: array_cache.ArraySpec(row.shape, names, (row for _ in names))
        )
        return {suffix: path.with_suffix(f".{suffix}").read_bytes() for suffix in ("npy", "json")}


def _changed_archive(root: Path, good: _Good, change: Callable[[_Good], bytes]) -> None:
    (root / f"{_SET}.zip").write_bytes(change(good))


def _changed_image(root: Path, good: _Good, touch: Callable[[Path], object]) -> None:
    _linked(good.folder, root / _SET)
    touch(root / _EARLY)


def _changed_cache(root: Path, good: _Good, kind: str, damage: Callable[[bytes], bytes]) -> None:
    (root / f"{_OTHER}.zip").unlink()
    for suffix, data in good.cache.items():
        content = damage(data) if suffix == kind else data
        (root / f"omniglot_28px_0.{suffix}").write_bytes(content)


def _images(draw: random.Random) -> dict[str, bytes]:
    pngs = []
    for _ in range(40):
        image = Image.new("1", (105, 105), 1)
        pen = ImageDraw.Draw(image)
        for _ in range(3):
            pen.line([draw.randrange(105) for _ in range(6)], fill=0, width=3)
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        pngs.append(buffer.getvalue())
    names = [f"{_SET}/Aaa/character{i + 1:02d}/{i + 1:04d}" for i in range(_FIRST)]
    names += [
        f"{_SET}/Alphabet{i // _OF_AN_ALPHABET:02d}/character{i % _OF_AN_ALPHABET + 1:02d}/{i:04d}"
        for i in range(_CHARACTERS - _FIRST)
    ]
    return {
        f"{name}_{example + 1:02d}.png": pngs[(place + example) % len(pngs)]
        for place, name in enumerate(names)
        for example in range(_EXAMPLES)
    }


def _archive_changes(draw: random.Random) -> Iterator[tuple[str, Callable[[_Good], bytes]]]:
    def damaged(damage: Damage) -> Callable[[_Good], bytes]:
        own = random.Random(draw.random())
        return lambda good: damage(good.archive, own)

    for damage in [truncated] * 14 + [*REPLACED] * 2:
        yield damage.__name__, damaged(damage)
    for _ in range(8):
        yield "an image's bit flipped", damaged(_image_flipped)
    for place in (16, 24, 42, 20, 10):  # check sum, sizes, offset, method of the first entry
        yield "its directory's entry changed", partial(_entry_changed, place=place)
    for name in ("images_background/Aaa/character01/0001_0x.PNG", "../" * 20, "/" * 80, "\0" * 80):
        yield "an image under another path", partial(_renamed, name=name)
    huge = huge_png(b"", draw)
    for content in (bytes(50_000_000), b"", b"no image", huge):
        name = f"an image of {len(content)} bytes"
        yield name, lambda good, content=content: _zipped({**good.images, _EARLY: content})


def _image_flipped(data: bytes, draw: random.Random) -> bytes:
    """A byte of one of the first images, compressed, past its local header."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        member = archive.infolist()[draw.randrange(_FIRST * _EXAMPLES)]
    start = member.header_offset + 30 + len(member.filename)
    return _changed(data, start + draw.randrange(member.compress_size), draw.randrange(1, 256))


def _entry_changed(good: _Good, place: int) -> bytes:
    with zipfile.ZipFile(io.BytesIO(good.archive)) as archive:
        return _changed(good.archive, archive.start_dir + place, 0x5A)


def _renamed(good: _Good, name: str) -> bytes:
    """The first image under another name of the same length, in the archive's directory."""
    data = good.archive
    place = data.rindex(_EARLY.encode())
    other = name[: len(_EARLY)].ljust(len(_EARLY), "x").encode()
    return data[:place] + other + data[place + len(other) :]


def _changed(data: bytes, place: int, by: int) -> bytes:
    return data[:place] + bytes([data[place] ^ by]) + data[place + 1 :]


def _zipped(images: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        for name, data in images.items():
            file.writestr(name, data)
    return buffer.getvalue()


def _linked(good: Path, folder: Path) -> None:
    """A set's folder whose alphabets are those of another, but for the first, which is a copy."""
    folder.mkdir()
    for alphabet in good.iterdir():
        if alphabet.name == "Aaa":
            shutil.copytree(alphabet, folder / "Aaa")
        else:
            (folder / alphabet.name).symlink_to(alphabet)


def _image_changes(draw: random.Random) -> Iterator[tuple[str, Callable[[Path], object]]]:
    damages = [png_cut] * 5 + [png_header_flipped] * 5 + [huge_png] * 3 + [*REPLACED] * 2
    for damage in damages:
        own = random.Random(draw.random())
        yield damage.__name__, partial(_damage, damage=damage, draw=own)
    yield "missing", Path.unlink
    yield "one too many", lambda path: shutil.copy(path, path.with_name("0001_99.png"))
    yield "a folder", lambda path: (path.unlink(), path.mkdir())
    yield "a link to nowhere", lambda path: (path.unlink(), path.symlink_to("nowhere"))
    yield "a character missing", lambda path: shutil.rmtree(path.parent)


def _damage(path: Path, damage: Damage, draw: random.Random) -> None:
    path.write_bytes(damage(path.read_bytes(), draw))
