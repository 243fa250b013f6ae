"""The threads that run requests."""

import os
import subprocess
import sys
import threading
import weakref

import pytest
from worlds import open_store

from metadist.deadlines import wait_until
from metadist.distributed.request_threads import RequestThreads

ENDLESS = """
import sys, time
import torch
import metadist as todist
from metadist.distributed import request_threads, rpc, transport

request_threads.REQUEST_SECONDS = transport.REQUEST_SECONDS = 0.5
rpc.SHUTDOWN_SECONDS, rpc.CLOSE_SECONDS = 5.0, 0.5


@todist.auto_init_rpc()
def main():
    if todist.get_rank() == 0:
        try:
            worker = int(sys.argv[1])
            todist.remote_sync_call(time.sleep, args=(999,), partitioner=worker, timeout=0.5)
        except TimeoutError:
            print("not waited for")


main()
print("done")
"""


@pytest.mark.parametrize("worker", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_program_ends_with_a_call_that_does_not(worker):
    store = open_store()
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", ENDLESS, str(worker)],
            env={**os.environ, **world, "TORCHELASTIC_USE_AGENT_STORE": "True", "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=90) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [out for out, _ in outputs] == ["not waited for\ndone\n", "done\n"]
    assert "a call to this process still runs; its result is dropped" in outputs[worker][1]
    error = "error: a call to this process has not ended, and is ended now."
    assert [error in errors for _, errors in outputs] == [worker == 0, worker == 1]
    assert [rank.returncode for rank in ranks] == [int(worker == 0), int(worker == 1)]


class Payload:
    """Stands for the tensors of a request."""


def test_threads_do_not_keep_what_their_requests_held():
    threads, kept = RequestThreads(), []

    def submit() -> None:
        payload, started = Payload(), threading.Event()
        kept.append(weakref.ref(payload))

        def request() -> None:
            assert payload
            started.set()

        threads.submit(request)
        assert started.wait(20)

    for _ in range(3):  # the first request of a thread, one between, and the last
        submit()
        assert threads.wait(20)
    assert wait_until(lambda: not any(reference() for reference in kept), 20.0, pause=0.01)
