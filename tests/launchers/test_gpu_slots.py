"""Concurrent jobs have different GPUs, in one process and in several ones."""

import multiprocessing
import tempfile
import time
from contextlib import ExitStack

import pytest

from metadist.errors import UserError
from metadist.launchers.gpu_slots import acquire_slot

PAIRS = [["0", "1"], ["2", "3"]]


def hold_slot(sender, directory: str) -> None:
    tempfile.tempdir = directory
    with ExitStack() as stack:
        sender.send(acquire_slot(PAIRS, stack))
        time.sleep(60)


@pytest.fixture(autouse=True)
def _temporary_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_the_first_slot_without_locked_gpus_is_acquired():
    pairs = [["0", "1"], ["2", "MIG-a/1"]]
    with ExitStack() as first, ExitStack() as second, ExitStack() as third:
        assert acquire_slot(pairs, first) == 0 and acquire_slot(pairs, second) == 1
        assert [acquire_slot(pairs, third) for _ in range(3)] in ([0, 1, 0], [1, 0, 1])  # shared
        first.close()
        assert acquire_slot([["1"], ["0"]], first) == 0
        assert acquire_slot(pairs, third) in (0, 1)  # one GPU of each is locked
        assert acquire_slot([["1"], ["0"]], third) == 1
        assert acquire_slot([], third) == 0


def test_processes_have_different_slots_until_they_die(tmp_path):
    context = multiprocessing.get_context("forkserver")  # that of `worlds`
    receiver, sender = context.Pipe(duplex=False)
    holder = context.Process(target=hold_slot, args=(sender, str(tmp_path)), daemon=True)
    holder.start()
    with ExitStack() as stack:
        assert receiver.poll(60) and receiver.recv() == 0
        assert acquire_slot(PAIRS, stack) == 1
        holder.kill()
        holder.join()
        assert acquire_slot(PAIRS, stack) == 0
    (directory,) = tmp_path.glob("metadist-*")
    assert directory.stat().st_mode & 0o777 == 0o700


def test_a_directory_that_others_can_access_is_refused(tmp_path):
    with ExitStack() as stack:
        acquire_slot([["0"]], stack)
    (directory,) = tmp_path.glob("metadist-*")
    directory.chmod(0o770)
    with ExitStack() as stack, pytest.raises(UserError, match=r"other users can .* TMPDIR"):
        acquire_slot([["0"]], stack)
