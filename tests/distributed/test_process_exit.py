"""The end of a process whose threads are in C++ at that moment."""

import subprocess
import sys

import pytest

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


@pytest.mark.parametrize("status", [0, 3])
def test_busy_threads_do_not_change_how_a_process_ends(status):
    done = subprocess.run(
        [sys.executable, "-c", BUSY, str(status)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (status, "")
    assert done.stdout.split("\n") == ["begun", "others finished", "handlers ran", ""]
