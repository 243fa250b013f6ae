"""Cleaning up after an error: in a thread that is waited for some seconds."""

import contextlib
import threading
from collections.abc import Callable

LEAVE_SECONDS = 3.0
"""Seconds that leaving after an error may take: a call, a collective or an upload that is stuck is
not waited for."""

_threads: list[threading.Thread] = []


def leave(function: Callable[[], object]) -> None:
    """Call a function, and wait at most `LEAVE_SECONDS` for it. Any rank, after an error.

    Args:
        function: leaves RPC or a process group, or closes a logger. What it raises is dropped: the
            error before it is the one to report.
    """

    def call() -> None:
        with contextlib.suppress(Exception):
            function()

    thread = threading.Thread(target=call, name="metadist-leave", daemon=True)
    _threads.append(thread)
    thread.start()
    thread.join(LEAVE_SECONDS)


def has_left() -> bool:
    """Whether every function that `leave` called in this process has returned, so that another job
    can run in it.
    """
    return not any(thread.is_alive() for thread in _threads)
