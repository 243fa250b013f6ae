"""Functions that corrupt the bytes of a file."""

import io
import random
import struct
import zlib
from collections.abc import Callable

from PIL import Image

Corruption = Callable[[bytes, random.Random], bytes]


def untouched(data: bytes) -> bytes:
    """No change."""
    return data


def truncated(data: bytes, rng: random.Random) -> bytes:
    """Truncated at a random offset."""
    return data[: rng.randrange(len(data))]


def flipped(data: bytes, rng: random.Random) -> bytes:
    """One random bit flipped."""
    changed = bytearray(data)
    changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def overwritten(data: bytes, rng: random.Random) -> bytes:
    """A range overwritten with random bytes or zeros, as by a bad sector."""
    length = rng.randint(16, max(17, len(data) // 8))
    start = rng.randrange(max(1, len(data) - length))
    replacement = rng.randbytes(length) if rng.random() < 0.5 else bytes(length)
    if data[start : start + length] == replacement:
        return flipped(data, rng)
    return data[:start] + replacement + data[start + length :]


def lengthened(data: bytes, rng: random.Random) -> bytes:
    """Random bytes appended."""
    return data + rng.randbytes(rng.randint(1, 500))


def emptied(data: bytes, rng: random.Random) -> bytes:
    """An empty file."""
    return b""


def noise(data: bytes, rng: random.Random) -> bytes:
    """Random bytes of the same length."""
    return rng.randbytes(len(data))


def html_page(data: bytes, rng: random.Random) -> bytes:
    """An HTML error page instead of the file."""
    return b"<html><body>404 not found</body></html>\n" * rng.randint(1, 50)


def jpeg(data: bytes, rng: random.Random) -> bytes:
    """A JPEG image instead of the file."""
    buffer = io.BytesIO()
    Image.new("L", (16, 16), rng.randrange(256)).save(buffer, "JPEG")
    return buffer.getvalue()


def huge_png(data: bytes, rng: random.Random) -> bytes:
    """A PNG of a few hundred bytes whose header declares tens of thousands of pixels a side."""
    side = rng.randint(20_000, 60_000)

    def chunk(kind: bytes, body: bytes) -> bytes:
        checksum = zlib.crc32(kind + body)
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", checksum)

    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    pixels = zlib.compress(bytes(100_000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels)


def png_header_flipped(data: bytes, rng: random.Random) -> bytes:
    """A bit flipped in the signature or header of a PNG, where decoders always notice it."""
    changed = bytearray(data)
    changed[rng.choice([*range(8), *range(12, 24)])] ^= 1 << rng.randrange(8)
    return bytes(changed)


def png_truncated(data: bytes, rng: random.Random) -> bytes:
    """A PNG truncated to less than half."""
    return data[: rng.randrange(len(data) // 2)]


PARTIAL: tuple[Corruption, ...] = (truncated, flipped, overwritten, lengthened)
"""Corruptions that a digest over the whole file must notice."""

REPLACEMENTS: tuple[Corruption, ...] = (emptied, noise, html_page, jpeg)
"""Other contents under the same file name."""
