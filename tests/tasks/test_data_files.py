"""The files of datasets: their fingerprint, their download, and one image."""

import io
import os
import sys
from pathlib import Path

import pytest
from PIL import Image
from torchvision.datasets import utils

from metadist.errors import UserError
from metadist.tasks.data_files import decode_image, download, error_line, fingerprint


def test_a_fingerprint_changes_with_names_sizes_times_and_options(tmp_path):
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
    assert len(found) == 5
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
    with pytest.raises(ValueError, match="cannot identify"):
        decode_image(encoded("GIF"), "L", 8, ("PNG", "JPEG"), 12)
    with pytest.raises(ValueError, match="it has 4 x 3 pixels"):
        decode_image(encoded("PNG"), "L", 8, ("PNG",), 11)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 5)  # Pillow's own limit comes first
    with pytest.raises(ValueError, match="exceeds limit"):
        decode_image(encoded("PNG"), "L", 8, ("PNG",), 12)


def test_an_error_is_one_short_line():
    assert error_line(OSError("a\n b")) == "a b" and error_line(KeyError()) == "KeyError"
    assert len(error_line(OSError("long " * 100))) == 200


def test_a_file_is_downloaded_once_and_without_a_progress_bar(tmp_path, monkeypatch, capfd):
    def fetch(url, folder, filename, md5):
        print("50%", file=sys.stderr)
        Path(folder, filename).write_text(f"{url} {md5}")

    monkeypatch.setattr(utils, "download_url", fetch)
    target = tmp_path / "data" / "a.zip"
    for md5 in ("first", "second"):
        download(target, lambda md5=md5: ("https://a", md5), "A", "put it there")
        assert target.read_text() == "https://a first"
    assert capfd.readouterr().err == ""
