"""Leaving RPC or a process group after an error: in a thread that is waited for some seconds."""

import contextlib
import threading
from collections.abc import Callable

LEAVE_SECONDS = 3.0
"""Seconds that leaving after an error may take: a call or a collective that is stuck is not waited
for."""

_threads: list[threading.Thread] = []


def leave(function: Callable[[], object]) -> None:
    """Call a function, and wait at most `LEAVE_SECONDS` for it. Any rank, after an error.

    Args:
        function: leaves RPC or a process group. What it raises is dropped: the error before it is
            the one to report.
    """

    def call() -> None:
        with contextlib.suppress(Exception):
            function()

    thread = threading.Thread(target=call, name="metadist-leave", daemon=True)
    _threads.append(thread)
    thread.start()
    thread.join(LEAVE_SECONDS)


def has_left() -> bool:
    """Whether every `leave` of this process has returned: RPC or a process group can be opened
    again.
    """
    return not any(thread.is_alive() for thread in _threads)
