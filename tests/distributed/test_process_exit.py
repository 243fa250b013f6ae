"""Leaving after an error, and the end of a process whose threads are in C++ at that moment."""

import io
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from metadist.distributed import process_exit

BUSY = """
import atexit, sys, threading, time
import torch.distributed as dist
from metadist.distributed.process_exit import exit_without_finalizing

atexit.register(print, "handlers ran")
store = dist.HashStore()


def serve():
    while True:
        store.set("key", "value")


def finish():
    time.sleep(0.2)
    print("others finished")


for _ in range(4):
    threading.Thread(target=serve, daemon=True).start()
threading.Thread(target=finish).start()
print("begun")
exit_without_finalizing(int(sys.argv[1]))
"""


@pytest.mark.parametrize("status", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_busy_threads_do_not_change_how_a_process_ends(status):
    done = subprocess.run(
        [sys.executable, "-c", BUSY, str(status)], capture_output=True, text=True, timeout=180
    )
    assert (done.returncode, done.stderr) == (status, "")
    assert done.stdout.split("\n") == ["begun", "others finished", "handlers ran", ""]


def test_what_does_not_return_is_left_behind(monkeypatch):
    monkeypatch.setattr(process_exit, "CLOSE_SECONDS", 0.1)
    released = threading.Event()
    process_exit.close_within_seconds(released.wait)
    assert not process_exit.all_closed()
    released.set()
    deadline = time.monotonic() + 60
    while not process_exit.all_closed() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert process_exit.all_closed()


def test_an_error_in_leaving_does_not_replace_the_error_before_it(capsys):
    def fail() -> None:
        raise LookupError("also broken")

    process_exit.close_within_seconds(fail)
    assert capsys.readouterr().err == "" and process_exit.all_closed()


def test_what_cannot_be_written_fails_the_process(monkeypatch):
    class Full:
        closed = False

        def flush(self) -> None:
            raise OSError("No space left on device")

    assert process_exit.flush_streams()
    closed = io.StringIO()
    closed.close()
    for stream, written in ((Full(), False), (closed, True), (None, True)):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", stream)
            assert process_exit.flush_streams() == written
    program = (
        "from metadist.distributed import process_exit as e; print(1); e.exit_without_finalizing(0)"
    )
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-c", program], stdout=full, timeout=180)
    assert done.returncode == 120
