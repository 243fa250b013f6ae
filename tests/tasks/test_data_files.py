"""The files of datasets: their fingerprint."""

import os

import pytest

from metadist.errors import UserError
from metadist.tasks.data_files import fingerprint


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
