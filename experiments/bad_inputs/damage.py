"""Ways to damage the bytes of a file."""

import io
import random
import struct
import zlib
from collections.abc import Callable

from PIL import Image

Damage = Callable[[bytes, random.Random], bytes]


def untouched(data: bytes) -> bytes:
    """None."""
    return data


def truncated(data: bytes, draw: random.Random) -> bytes:
    """Cut off at any place."""
    return data[: draw.randrange(len(data))]


def flipped(data: bytes, draw: random.Random) -> bytes:
    """One bit changed, at any place."""
    changed = bytearray(data)
    changed[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def overwritten(data: bytes, draw: random.Random) -> bytes:
    """A stretch of other bytes, as a disk's bad sector leaves it."""
    length = draw.randint(16, max(17, len(data) // 8))
    start = draw.randrange(max(1, len(data) - length))
    stretch = draw.randbytes(length) if draw.random() < 0.5 else bytes(length)
    if data[start : start + length] == stretch:
        return flipped(data, draw)
    return data[:start] + stretch + data[start + length :]


def lengthened(data: bytes, draw: random.Random) -> bytes:
    """Something added at the end."""
    return data + draw.randbytes(draw.randint(1, 500))


def emptied(data: bytes, draw: random.Random) -> bytes:
    """Nothing left."""
    return b""


def of_noise(data: bytes, draw: random.Random) -> bytes:
    """Other bytes, as many."""
    return draw.randbytes(len(data))


def of_text(data: bytes, draw: random.Random) -> bytes:
    """A page of a web server in the place of a file."""
    return b"<html><body>404 not found</body></html>\n" * draw.randint(1, 50)


def of_an_image(data: bytes, draw: random.Random) -> bytes:
    """A photograph's format in the place of a PNG or of anything else."""
    buffer = io.BytesIO()
    Image.new("L", (16, 16), draw.randrange(256)).save(buffer, "JPEG")
    return buffer.getvalue()


def huge_png(data: bytes, draw: random.Random) -> bytes:
    """A PNG of a few hundred bytes that says it is tens of thousands of pixels wide."""
    side = draw.randint(20_000, 60_000)

    def chunk(kind: bytes, body: bytes) -> bytes:
        check = zlib.crc32(kind + body)
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", check)

    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    pixels = zlib.compress(bytes(100_000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels)


def png_header_flipped(data: bytes, draw: random.Random) -> bytes:
    """A bit of a PNG's signature or header; the rest of one is not always missed."""
    changed = bytearray(data)
    changed[draw.choice([*range(8), *range(12, 24)])] ^= 1 << draw.randrange(8)
    return bytes(changed)


def png_cut(data: bytes, draw: random.Random) -> bytes:
    """A PNG of which less than half is left."""
    return data[: draw.randrange(len(data) // 2)]


ANYWHERE: tuple[Damage, ...] = (truncated, flipped, overwritten, lengthened)
"""Damages that a digest over the whole file must notice."""

REPLACED: tuple[Damage, ...] = (emptied, of_noise, of_text, of_an_image)
"""Something else under the file's name."""
