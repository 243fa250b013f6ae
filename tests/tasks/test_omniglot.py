import os
import stat
import subprocess
import sys

import numpy as np
import pytest
from filelock import FileLock
from omniglot_tree import (
    by_name,
    images,
    png,
    refused,
    write_folders,
    write_zip,
    write_zips,
)

from metadist.tasks import SPLITS, Omniglot, array_cache

pytestmark = pytest.mark.usefixtures("small_omniglot")


def test_split_depends_on_seed_and_names(tmp_path):
    zips = Omniglot(str(write_zips(tmp_path / "zips")), seed=5)
    folders = Omniglot(str(write_folders(tmp_path / "folders").parent / "folders"), seed=5)
    assert zips.characters == folders.characters
    assert [len(zips.characters[split]) for split in SPLITS] == [3, 2, 2]
    assert len(set().union(*zips.characters.values())) == 7
    assert any(
        Omniglot(str(tmp_path / "zips"), seed=seed).characters != zips.characters
        for seed in range(3)
    )
    assert zips.protocol() == {
        "dataset": "omniglot",
        "data_checksum": folders.protocol()["data_checksum"],
        "rotations": True,
        "test_rotations": True,
        "class_split": "random",
        "split_seed": 5,
        "within_alphabet": False,
        "classes": {"train": 3, "validation": 2, "test": 2},
        "image_size": 28,
    }


def test_a_published_split_has_no_seed(tmp_path):
    protocol = Omniglot(str(write_zips(tmp_path)), split="vinyals", seed=5).protocol()
    assert protocol["class_split"] == "vinyals" and "split_seed" not in protocol


def test_decoded_once_and_again_when_a_source_changes(tmp_path, decodings):
    root = write_zips(tmp_path / "data")
    before = by_name(Omniglot(str(root)))
    again = Omniglot(str(root))
    assert decodings == [28]
    assert isinstance(array_base(again.images[0]), np.memmap)
    assert not again.images[0].flags.writeable
    Omniglot(str(root), size=14)
    assert decodings == [28, 14]
    members = images("images_evaluation")
    changed = next(iter(members))
    write_zip(root / "images_evaluation.zip", members | {changed: png(9, 9)})
    after = by_name(Omniglot(str(root)))
    assert decodings == [28, 14, 28]
    different = [name for name in before if not np.array_equal(before[name], after[name])]
    assert different == [changed.rpartition("/")[0]]


def array_base(array):
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def test_cache_lies_in_root_or_where_it_is_told_or_in_the_users(tmp_path, monkeypatch, decodings):
    root = write_zips(tmp_path / "data")
    Omniglot(str(root))
    [cache] = root.glob("*.npy")
    names = cache.with_suffix(".json")
    for file in (cache, names):
        file.rename(tmp_path / file.name)
    monkeypatch.setenv("METADIST_CACHE", str(tmp_path / "chosen"))
    Omniglot(str(root))
    assert (tmp_path / "chosen" / cache.name).exists()
    assert not cache.exists()
    monkeypatch.delenv("METADIST_CACHE")
    root.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        Omniglot(str(root))
        assert (tmp_path / "xdg" / "metadist" / cache.name).exists()
        assert not cache.exists()
        assert len(decodings) == 3
    finally:
        root.chmod(stat.S_IRWXU)
    # What is found in a root counts, wherever new files would go.
    for file in (cache, names):
        (tmp_path / file.name).rename(file)
    monkeypatch.setenv("METADIST_CACHE", str(tmp_path / "other"))
    Omniglot(str(root))
    assert len(decodings) == 3


CHILD = """
import sys, time, zlib
from pathlib import Path
from metadist.tasks import Omniglot, omniglot, omniglot_files
from metadist.tasks.decoded_images import Counts
root, log = map(Path, sys.argv[1:3])
Omniglot.expected = {"images_background": Counts(4, 20), "images_evaluation": Counts(3, 20)}
omniglot.NON_TEST_CHARACTERS, omniglot.VALIDATION_CHARACTERS = 5, 2
decode = omniglot_files.decode
def slowly(*args):
    with log.open("a") as file:
        file.write("decoded\\n")
    time.sleep(0.4)
    return decode(*args)
omniglot_files.decode = slowly
print("ready", flush=True)
sys.stdin.readline()
print(zlib.crc32(b"".join(map(bytes, Omniglot(str(root)).images))))
"""


@pytest.mark.slow
def test_of_two_processes_one_decodes_and_the_other_waits(tmp_path):
    root, log = write_zips(tmp_path / "data"), tmp_path / "log"
    path = os.pathsep.join(filter(None, sys.path))
    children = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD, str(root), str(log)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )
        for _ in range(2)
    ]  # fmt: skip
    try:
        for child in children:
            assert child.stdout.readline() == "ready\n"
        for child in children:
            child.stdin.write("\n")
            child.stdin.flush()
        sums = [child.communicate(timeout=180)[0] for child in children]
    finally:
        for child in children:
            child.kill()
    assert [child.returncode for child in children] == [0, 0]
    assert log.read_text() == "decoded\n"
    assert sums[0] == sums[1]
    assert sums[0].strip().isdigit()


def test_waiting_for_another_process_ends(tmp_path, monkeypatch):
    root = write_zips(tmp_path / "data")
    Omniglot(str(root))
    [cache] = root.glob("*.npy")
    cache.unlink()
    monkeypatch.setattr(array_cache, "LOCK_SECONDS", 0.2)
    with FileLock(root / f".{cache.name}.lock"):
        refused(lambda: Omniglot(str(root)), cache.name, "another process")


def test_cache_directory_that_cannot_be_made(tmp_path, monkeypatch):
    root = write_zips(tmp_path / "data")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("METADIST_CACHE", str(tmp_path / "file" / "cache"))
    refused(lambda: Omniglot(str(root)), tmp_path / "file", "METADIST_CACHE")


def test_disk_full(tmp_path, monkeypatch):
    root = write_zips(tmp_path / "data")

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(array_cache.np.lib.format, "write_array_header_1_0", full)
    refused(lambda: Omniglot(str(root)), "No space left on device", root, "METADIST_CACHE")
    assert not list(root.glob(".*.part"))
