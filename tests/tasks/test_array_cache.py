import threading
import time
import tracemalloc

import numpy as np
import pytest
from filelock import FileLock

from metadist.errors import UserError
from metadist.tasks import array_cache
from metadist.tasks.array_cache import Making, load, load_or_make, locked, part_of


def rows(count, size):
    for index in range(count):
        yield np.full((size,), index % 251, dtype=np.uint8)


def test_no_more_than_a_row_is_held(tmp_path):
    names = [f"row {index}" for index in range(300)]
    tracemalloc.start()
    try:
        made = load_or_make(
            tmp_path / "a.npy", lambda: Making((1 << 18,), names, rows(300, 1 << 18))
        )
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert made.array.shape == (300, 1 << 18) and made.names == names
    assert np.array_equal(made.array[:, 7], np.arange(300) % 251)
    # 75 MiB in all: a row of a quarter, and the blocks of 4 MiB in which the file is checked.
    assert peak < 12 << 20
    assert np.array_equal(np.load(tmp_path / "a.npy"), made.array)


def test_a_making_that_fails_leaves_nothing(tmp_path):
    def broken():
        yield np.zeros(4, dtype=np.uint8)
        raise UserError("the third image cannot be decoded")

    with pytest.raises(UserError, match="third image"):
        load_or_make(tmp_path / "a.npy", lambda: Making((4,), ["a", "b"], broken()))
    assert {path.suffix for path in tmp_path.iterdir()} <= {".lock"}
    assert load(tmp_path / "a.npy") is None


def test_others_wait_as_long_as_the_file_grows(tmp_path, monkeypatch):
    monkeypatch.setattr(array_cache, "LOCK_SECONDS", 0.5)
    path = tmp_path / "a.npy"
    lock = FileLock(tmp_path / ".a.npy.lock", thread_local=False)
    lock.acquire()

    def grow():
        for count in range(15):
            part_of(path).write_bytes(bytes(count))
            time.sleep(0.1)
        lock.release()

    maker = threading.Thread(target=grow)
    maker.start()
    started = time.monotonic()
    try:
        with locked(path, "nothing"):
            assert time.monotonic() - started > 1
    finally:
        maker.join()
    with lock, pytest.raises(UserError, match="without getting on"), locked(path, "nothing"):
        pass
