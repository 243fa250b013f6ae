"""The threads that run requests."""

import contextlib
import io
import os
import subprocess
import sys
import threading
import weakref

import pytest
from commands import without_gloo
from worlds import open_store, run_world

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


def run_endless(worker: int) -> str:
    """Run the program in this process; what it printed."""
    sys.argv = ["", str(worker)]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(ENDLESS, {"__name__": "__main__"})
    return printed.getvalue()


@pytest.mark.parametrize("worker", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_program_ends_with_a_call_that_does_not(worker):
    """The worker that is called is a program of its own."""
    store, other = open_store(), 1 - worker
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    program = subprocess.Popen(
        [sys.executable, "-c", ENDLESS, str(worker)],
        env={**os.environ, **world, "RANK": str(worker), "LOCAL_RANK": str(worker)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        ranks = {"RANK": str(other), "LOCAL_RANK": str(other)}
        (printed,) = run_world(run_endless, 1, worker, environment=world | ranks, store=store)
        output, errors = program.communicate(timeout=180)
    finally:
        program.kill()
    outputs = {worker: without_gloo(output), other: printed}
    assert outputs == {0: "not waited for\ndone\n", 1: "done\n"}
    if worker == 0:  # its own call
        assert "a call to this process still runs; its result is dropped" in errors
    assert "error: a call to this process has not ended, and is ended now." in errors
    assert program.returncode == 1


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
    assert wait_until(lambda: not any(reference() for reference in kept), 120.0, pause=0.01)
