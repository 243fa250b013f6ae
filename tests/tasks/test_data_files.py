"""The files of datasets: their fingerprint, their download, and one image."""

import io
import os
import struct
import zlib

import numpy as np
import pytest
from PIL import Image
from requests import exceptions

from metadist.errors import UserError
from metadist.tasks.data_files import (
    decode_image,
    download,
    fingerprint,
    resize_image,
)


def test_a_fingerprint_changes_with_names_sizes_times_contents_and_options(tmp_path):
    file = tmp_path / "a.png"
    file.write_bytes(b"12")
    os.utime(file, ns=(10**18, 10**18))
    first = fingerprint([("a.png", file)], 28)
    assert first == fingerprint([("a.png", file)], 28) and len(first) == 16
    found = {first, fingerprint([("b.png", file)], 28), fingerprint([("a.png", file)], 84)}
    os.utime(file, ns=(10**18, 10**18 + 1))
    found.add(fingerprint([("a.png", file)], 28))
    file.write_bytes(b"123")
    os.utime(file, ns=(10**18, 10**18))
    found.add(fingerprint([("a.png", file)], 28))
    file.write_bytes(b"124")  # as in another dataset
    os.utime(file, ns=(10**18, 10**18))
    found.add(fingerprint([("a.png", file)], 28))
    assert len(found) == 6
    with pytest.raises(UserError, match=r"b\.png"):
        fingerprint([("b.png", tmp_path / "b.png")])


def encoded(kind: str, size: tuple[int, int] = (4, 3)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size).save(file, kind)
    return file.getvalue()


def test_what_is_no_image_of_the_formats_or_too_large_is_refused(monkeypatch):
    assert decode_image(encoded("PNG"), "L", 8, ("PNG",), 12).shape == (8, 8)
    with pytest.raises(ValueError, match="the file is empty"):
        decode_image(b"", "L", 8, ("PNG",), 12)
    with pytest.raises(ValueError, match="of no known image format"):
        decode_image(encoded("GIF"), "L", 8, ("PNG", "JPEG"), 12)
    with pytest.raises(ValueError, match="it has 4 x 3 pixels"):
        decode_image(encoded("PNG"), "L", 8, ("PNG",), 11)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 5)  # Pillow's own limit comes first
    with pytest.raises(ValueError, match="exceeds limit"):
        decode_image(encoded("PNG"), "L", 8, ("PNG",), 12)


def decoded(image: Image.Image, kind: str, mode: str = "L", **options) -> np.ndarray:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return decode_image(file.getvalue(), mode, 16, (kind,), 256)


@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_images_of_16_bits_are_scaled_to_8(kind, mode):
    pixels = np.arange(256, dtype=np.uint16).reshape(16, 16)
    found = decoded(Image.fromarray(pixels * 257), kind, mode)
    assert np.array_equal(found if mode == "L" else found[..., 1], pixels)


def test_a_tiff_of_16_bits_whose_zero_is_white_is_inverted():
    pixels = np.arange(256, dtype=np.uint16).reshape(16, 16) * 257
    found = decoded(Image.fromarray(65535 - pixels), "TIFF", "L", tiffinfo={262: 0})
    assert np.array_equal(found, pixels >> 8)


def test_a_pgm_file_of_16_bits_is_scaled_to_8():
    data = b"P5\n2 1\n65535\n" + np.array([0x1234, 0xFF00], ">u2").tobytes()
    found = decode_image(data.replace(b"2 1", b"2 2", 1) + data[-4:], "L", 2, ("PPM",), 4)
    assert found[0].tolist() == [0x12, 0xFF]


@pytest.mark.parametrize("order", ["I;16", "I;16B", "I;16L"])
def test_images_of_16_bits_of_either_byte_order(order):
    data = np.full((4, 4), 0x1234, ">u2" if order == "I;16B" else "<u2").tobytes()
    image = Image.frombytes(order, (4, 4), data)
    assert (resize_image(image, "L", 4) == 0x12).all()


@pytest.mark.parametrize("mode", ["I", "F"])
def test_images_whose_range_is_unknown_are_refused(mode):
    with pytest.raises(ValueError, match=f"its mode is {mode}, expected 8 or 16 bits"):
        decoded(Image.new(mode, (16, 16), 70_000), "TIFF")


def transparent_images() -> dict[str, tuple[Image.Image, dict]]:
    """Black strokes on what is transparent and black too, and options of their file."""
    stroke = np.zeros((16, 16), np.uint8)
    stroke[4:8] = 255
    alpha = Image.fromarray(stroke)
    black = Image.new("L", (16, 16))
    grey = Image.merge("LA", (black, alpha))
    levels = Image.fromarray(np.where(stroke, 0, 9).astype(np.uint8))
    palette = levels.convert("P")
    palette.putpalette([0] * 768)
    return {
        "RGBA": (grey.convert("RGBA"), {}),
        "LA": (grey, {}),
        "L": (levels, {"transparency": 9}),
        "RGB": (levels.convert("RGB"), {"transparency": (9, 9, 9)}),
        "P": (palette, {"transparency": 9}),
    }


@pytest.mark.parametrize("name", ["RGBA", "LA", "L", "RGB", "P"])
def test_transparent_images_are_put_on_white(name):
    image, options = transparent_images()[name]
    found = decoded(image, "PNG", **options)
    assert (found[4:8] == 0).all() and (np.delete(found, slice(4, 8), 0) == 255).all()


def png_of_16_bits(pixels: np.ndarray, transparent: np.ndarray) -> bytes:
    """A PNG file, grey (h, w) or RGB (h, w, 3), with a transparent color; Pillow writes none."""

    def chunk(name: bytes, data: bytes) -> bytes:
        checksum = zlib.crc32(name + data)
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", checksum)

    height, width = pixels.shape[:2]
    header = struct.pack(">IIBBBBB", width, height, 16, 2 if pixels.ndim == 3 else 0, 0, 0, 0)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    content = chunk(b"tRNS", transparent.astype(">u2").tobytes()) + chunk(
        b"IDAT", zlib.compress(rows)
    )
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + content + chunk(b"IEND", b"")


@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize("color", [np.array(40_000), np.array([40_000, 300, 10])])
def test_transparent_images_of_16_bits_are_put_on_white(color, mode):
    pixels = np.zeros((16, 16, *color.shape), np.uint16)
    pixels[:8] = color
    found = decode_image(png_of_16_bits(pixels, color), mode, 16, ("PNG",), 256)
    assert (found[:8] == 255).all() and (found[8:] == 0).all()


def test_half_transparent_pixels_are_mixed_with_white():
    found = decoded(Image.new("RGBA", (16, 16), (255, 0, 0, 51)), "PNG", "RGB")
    assert (found == (255, 204, 204)).all()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (exceptions.ConnectTimeout("long"), "the connection to the server failed"),
        (exceptions.ProxyError("long"), "the connection to the proxy failed"),
        (exceptions.SSLError("certificate verify failed"), "certificate verify failed"),
        (exceptions.HTTPError("404"), "404"),
    ],
)
def test_why_a_download_failed(tmp_path, monkeypatch, error, reason):
    def fail(*args, **options):
        raise error

    monkeypatch.setattr("requests.get", fail)
    with pytest.raises(UserError) as caught:
        download(tmp_path / "a.zip", "https://a", "md5:0", "put it there")
    message = f"https://a could not be downloaded ({reason}): check the network, or put it there."
    assert str(caught.value) == message
