"""The threads that run requests."""

import threading
import weakref

from metadist.deadlines import wait_until
from metadist.distributed.request_threads import RequestThreads


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
