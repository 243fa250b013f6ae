"""The threads of this process that run requests."""

import atexit
import concurrent.futures
import queue
import sys
import threading
from collections.abc import Callable

from metadist.distributed.process_exit import all_closed, end_process, finalizes

REQUEST_SECONDS = 20.0
"""Seconds that a graceful shutdown and the end of a program wait for requests that still run."""

CALL_STILL_RUNS = "a call to this process still runs; its result is dropped"
"""The warning after that time."""

_Running = concurrent.futures.Future[None]


class RequestThreads:
    """Runs functions on threads, of which there are as many as functions that run at once.

    A request may wait for further requests that it sends, to any depth, so no request waits for a
    free thread. The callers bound the number of requests: a call sends one to each worker, however
    many shards it has. Consecutive requests run on the same thread and reuse its memory.
    """

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[tuple[Callable[[], object], _Running]]
        self._waiting = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._running: set[_Running] = set()
        self._own: set[_Running] = set()

    def submit(self, function: Callable[[], object], own: bool = False) -> None:
        """Run a function that raises no exception.

        Args:
            function: the function.
            own: whether it is a request of this process to itself.
        """
        running: _Running = concurrent.futures.Future()
        for group in (self._running, self._own) if own else (self._running,):
            group.add(running)
            running.add_done_callback(group.discard)
        if not self._idle.acquire(blocking=False):
            # Without arguments, which a thread would keep as long as it runs.
            thread = threading.Thread(target=self._run, name="metadist-request", daemon=True)
            try:
                thread.start()
            except BaseException:
                running.cancel()
                raise
        self._waiting.put((function, running))

    def _run(self) -> None:
        while True:
            function, running = self._waiting.get()
            function()
            # The tensors of the request are freed before the program may end: a destructor in C++
            # that waits for the GIL aborts the process then.
            del function
            running.set_result(None)
            del running
            self._idle.release()

    def wait(self, seconds: float | None = None, own: bool = False) -> bool:
        """Wait for the functions that run now.

        Args:
            seconds: the longest wait; None for no limit.
            own: whether to wait only for requests of this process to itself.

        Returns:
            Whether all of them have ended.
        """
        running = self._own if own else self._running
        return not concurrent.futures.wait(running, seconds).not_done


request_threads = RequestThreads()
"""The threads of this process."""


@atexit.register
def _end_requests() -> None:
    """Wait for requests at the end of a program, but not after an uncaught exception.

    A thread that returns from C++ while Python is being finalized aborts the process. If requests
    do not end in time, the process ends with them, and with status 1.
    """
    if not finalizes() or (request_threads.wait(0) and all_closed()):
        return
    if hasattr(sys, "last_value"):  # of an uncaught exception, which Python has printed
        end_process(1)
    if not request_threads.wait(REQUEST_SECONDS) or not all_closed():
        print("error: a call to this process has not ended, and is ended now.", file=sys.stderr)
        end_process(1)
