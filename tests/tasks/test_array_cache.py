import json
import os
import shutil
import stat
import subprocess
import sys
import tracemalloc
import zlib

import numpy as np
import pytest
from filelock import FileLock, Timeout

from metadist.errors import UserError
from metadist.files import partial_path
from metadist.tasks import array_cache
from metadist.tasks.array_cache import ArraySpec, file_lock, load_or_create


def rows(count, size):
    for index in range(count):
        yield np.full((size,), index % 251, dtype=np.uint8)


def test_no_more_than_a_row_is_held(tmp_path):
    names = [f"row {index}" for index in range(300)]
    tracemalloc.start()
    try:
        made = load_or_create(
            tmp_path, "a_0.npy", lambda: ArraySpec((1 << 18,), names, rows(300, 1 << 18))
        )
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert made.array.shape == (300, 1 << 18)
    assert made.names == names
    assert np.array_equal(made.array[:, 7], np.arange(300) % 251)
    # 75 MiB in all: a row of a quarter, and the blocks of 4 MiB in which the file is checked.
    assert peak < 12 << 20
    assert np.array_equal(np.load(tmp_path / "a_0.npy"), made.array)


def test_both_files_are_on_disk_before_they_get_their_names(tmp_path, monkeypatch):
    synchronized = []

    def record(descriptor):
        named = sorted(path.suffix for path in tmp_path.glob("a_0.*"))
        if stat.S_ISREG(os.fstat(descriptor).st_mode):  # not the directory
            synchronized.append((os.fstat(descriptor).st_size, named))

    monkeypatch.setattr(os, "fsync", record)
    load_or_create(tmp_path, "a_0.npy", lambda: ArraySpec((4,), ["a", "b"], rows(2, 4)))
    sizes = [(tmp_path / f"a_0{suffix}").stat().st_size for suffix in (".npy", ".json")]
    assert synchronized[:2] == [(sizes[0], []), (sizes[1], [".npy"])]


def test_a_failed_creation_leaves_nothing(tmp_path):
    def broken():
        yield np.zeros(4, dtype=np.uint8)
        raise UserError("the third image cannot be decoded")

    with pytest.raises(UserError, match="third image"):
        load_or_create(tmp_path, "a_0.npy", lambda: ArraySpec((4,), ["a", "b"], broken()))
    assert {path.suffix for path in tmp_path.iterdir()} <= {".lock"}


class BusyLock(FileLock):
    """A lock that another process holds during five waits for it."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.waits = []

    def acquire(self, timeout=None, **kwargs):
        self.waits.append(timeout)
        if len(self.waits) <= 5:
            self.during_a_wait(len(self.waits))
            raise Timeout(self.lock_file)
        return super().acquire(timeout=timeout, **kwargs)


def test_others_wait_as_long_as_the_file_grows(tmp_path, monkeypatch):
    path = tmp_path / "a.npy"
    locks = []

    def lock(name):
        locks.append(BusyLock(name))
        locks[0].during_a_wait = lambda wait: partial_path(path).write_bytes(bytes(wait))
        return locks[0]

    monkeypatch.setattr(array_cache, "FileLock", lock)
    with file_lock(path, "nothing"):
        assert locks[0].waits == [array_cache.LOCK_SECONDS] * 6


@pytest.mark.parametrize("grows_until", [0, 3])
def test_a_file_that_does_not_grow_is_waited_for_once(tmp_path, monkeypatch, grows_until):
    path = tmp_path / "a.npy"
    waits = []

    def lock(name):
        made = BusyLock(name)
        made.waits = waits
        made.during_a_wait = lambda wait: partial_path(path).write_bytes(
            bytes(min(wait, grows_until) + 1)
        )
        return made

    partial_path(path).write_bytes(bytes(1))
    monkeypatch.setattr(array_cache, "FileLock", lock)
    with pytest.raises(UserError, match="without progress"), file_lock(path, "nothing"):
        pass
    assert len(waits) == grows_until + 1


def test_a_lock_is_held_by_one_and_released(tmp_path, monkeypatch):
    monkeypatch.setattr(array_cache, "LOCK_SECONDS", 0.05)
    path = tmp_path / "folder" / "a.npy"
    for _ in range(2):
        with file_lock(path, "nothing"):
            other = FileLock(path.with_name(".a.npy.lock"))
            with pytest.raises(Timeout):
                other.acquire(timeout=0.01)


LOAD = """
import os, sys, zlib
from pathlib import Path
from metadist.tasks.array_cache import load_or_create

def refuse():
    raise AssertionError("created again")

read, crc32 = 0, zlib.crc32
def counting(data, *start):
    global read
    read += len(data)
    return crc32(data, *start)

zlib.crc32 = counting
root = Path(sys.argv[1])
found = load_or_create(root, "a_0.npy", refuse)
print(read, found.array[3, 0], found.names[3])
"""


def load_in_another_process(root):
    """Bytes of which the process computed the checksum, and an element and a name."""
    output = subprocess.run(
        [sys.executable, "-c", LOAD, str(root)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True, text=True, timeout=180, check=True,
    ).stdout.split()  # fmt: skip
    return int(output[0]), output[1:]


@pytest.fixture
def cached(tmp_path):
    """The file of an array of 5 MB."""
    root = tmp_path / "data"
    root.mkdir()
    names = [f"row{index}" for index in range(5)]
    load_or_create(root, "a_0.npy", lambda: ArraySpec((10**6,), names, rows(5, 10**6)))
    return root / "a_0.npy"


def test_another_process_does_not_verify_again(cached):
    assert load_in_another_process(cached.parent) == (0, ["3", "row3"])


def rewrite(cached):
    cached.write_bytes(cached.read_bytes())


def keep_the_modification_time(cached):
    status = cached.stat()
    rewrite(cached)
    os.utime(cached, ns=(status.st_atime_ns, status.st_mtime_ns))


def replace(cached):
    copy = cached.with_name("copy")
    shutil.copy2(cached, copy)
    copy.replace(cached)


def replace_the_names(cached):
    replace(cached.with_suffix(".json"))


def marker_of_another_user(cached):
    [marker] = cached.parent.glob(".*.verified")
    os.chown(marker, 65534, 65534)


def no_marker(cached):
    [marker] = cached.parent.glob(".*.verified")
    marker.unlink()


@pytest.mark.parametrize(
    "change",
    [
        rewrite,
        keep_the_modification_time,
        replace,
        replace_the_names,
        no_marker,
        pytest.param(
            marker_of_another_user,
            marks=pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away"),
        ),
    ],
)
def test_a_changed_file_is_verified_again(cached, change):
    change(cached)
    verified, found = load_in_another_process(cached.parent)
    assert verified > 5 * 10**6
    assert found == ["3", "row3"]
    assert load_in_another_process(cached.parent) == (0, ["3", "row3"])


def header(old: bytes, new: bytes):
    def change(file):
        data = file.read_bytes()
        file.write_bytes(data[:128].replace(old, new) + data[128:])

    return change


def one_byte(file):
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    status = file.stat()
    file.write_bytes(data)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize(
    "damage",
    [
        header(b"}", b"("),
        header(b"|u1", b"|,1"),
        one_byte,
        lambda file: file.write_bytes(file.read_bytes()[:2_000_000]),
        lambda file: np.save(file, np.array([{"a": 1}]), allow_pickle=True),
        lambda file: file.with_suffix(".json").write_text('{"names": ["a"'),
        lambda file: file.with_suffix(".json").unlink(),
    ],
    ids=["bracket", "type", "byte", "truncated", "pickle", "names", "no names"],
)
def test_a_damaged_cache_is_made_anew(cached, damage):
    damage(cached)
    remade = load_or_create(cached.parent, cached.name, lambda: ArraySpec((2,), ["a"], rows(1, 2)))
    assert remade.names == ["a"]
    assert not list(cached.parent.glob(".*.part"))


def test_arrays_of_earlier_images_are_named(tmp_path, caplog):
    caplog.set_level("INFO")
    for name in ("a_0.npy", "a_1.npy"):
        load_or_create(tmp_path, name, lambda: ArraySpec((3,), ["a"], rows(1, 3)))
    assert caplog.messages[-1] == "arrays of earlier images, which may be deleted: a_0.npy"


def test_markers_of_a_directory_that_is_read_only_are_in_the_users_cache(cached, tmp_path):
    root = cached.parent
    for hidden in root.glob(".*"):
        hidden.unlink()
    root.chmod(0o500)
    try:
        verified, _ = load_in_another_process(root)
        assert verified > 5 * 10**6
        assert load_in_another_process(root) == (0, ["3", "row3"])
        assert [file.name for file in root.iterdir() if file.name.startswith(".")] == []
    finally:
        root.chmod(0o700)


def test_a_finished_array_needs_no_cache_directory(cached, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("METADIST_CACHE", str(tmp_path / "file" / "cache"))
    [verified, found] = load_in_another_process(cached.parent)
    assert verified > 5 * 10**6
    assert found == ["3", "row3"]


@pytest.mark.parametrize(
    ("array", "names"),
    [
        (np.zeros((2, 3), np.int8), ["a", "b"]),
        (np.zeros((3, 2), np.uint8).T, ["a", "b"]),
        (np.zeros((2, 3), np.uint8), ["a"]),
        (np.zeros((2, 3), np.uint8), 2),
        (np.zeros((2, 3), np.uint8), [1, 2]),
    ],
    ids=["type", "order", "names", "no names", "no text"],
)
def test_files_that_are_no_cached_array_are_not_used(tmp_path, caplog, array, names):
    np.save(tmp_path / "a_0.npy", array)
    crc32 = zlib.crc32(
        (tmp_path / "a_0.npy").read_bytes()[128:],
        zlib.crc32(json.dumps([names, list(array.shape)]).encode()),
    )
    (tmp_path / "a_0.json").write_text(json.dumps({"names": names, "crc32": crc32}))
    made = load_or_create(tmp_path, "a_0.npy", lambda: ArraySpec((3,), ["c", "d"], rows(2, 3)))
    assert made.names == ["c", "d"]
    assert f"{tmp_path / 'a_0.npy'} is corrupt and will not be used" in caplog.messages
    np.save(tmp_path / "a_0.npy", np.zeros((2, 3), np.uint8))
    (tmp_path / "a_0.json").write_text(json.dumps({"names": ["a", "b"], "crc32": zlib.crc32(
        bytes(6), zlib.crc32(b'[["a", "b"], [2, 3]]'))}))  # fmt: skip
    found = load_or_create(tmp_path, "a_0.npy", lambda: ArraySpec((3,), ["e"], rows(1, 3)))
    assert found.names == ["a", "b"]
