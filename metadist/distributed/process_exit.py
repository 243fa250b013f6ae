"""What a process does at its end: closing with a deadline after an error, and the exit itself."""

import atexit
import multiprocessing
import os
import sys
from collections.abc import Callable
from concurrent.futures import Future
from typing import NoReturn

from metadist.deadlines import call_within

CLOSE_SECONDS = 3.0
"""Seconds that closing may take after an error: a call, a collective or an upload that is stuck is
not waited for."""

_calls: list[Future[object]] = []

_FLUSH_FAILED = 120
"""Python's exit status when standard output could not be written."""


def close_within_seconds(function: Callable[[], object]) -> None:
    """Call a function, and wait at most `CLOSE_SECONDS` for it. Any rank, after an error.

    Args:
        function: leaves RPC or a process group, or closes a logger. What it raises is dropped: the
            error before it is the one to report.
    """
    _calls.append(call_within(CLOSE_SECONDS, function))


def all_closed() -> bool:
    """Whether every function that `close_within_seconds` called in this process has returned, so
    that another job can run in it.
    """
    return all(call.done() for call in _calls)


def exit_without_finalizing(status: int) -> NoReturn:
    """`sys.exit`, without finalizing the interpreter.

    A thread that returns from C++ while Python is finalized (from the job's store, from RPC's
    shutdown) aborts the process: "terminate called without an active exception", and a finished
    run counts as failed (https://github.com/pytorch/pytorch/issues/38228). Non-daemon threads are
    joined and exit handlers run as usual. It is a program's last statement, on its main thread:
    catching the SystemExit does not change the exit status.

    Args:
        status: the exit status.

    Raises:
        SystemExit: always.
    """
    if multiprocessing.parent_process() is None:  # multiprocessing's processes already end so
        atexit.register(_end, status)
    sys.exit(status)


def flush_streams() -> bool:
    """Flush the standard streams; whether it succeeded."""
    written = True
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except OSError:
            written = False
    return written


def _end(status: int) -> NoReturn:
    atexit.unregister(_end)
    atexit._run_exitfuncs()
    os._exit(status if flush_streams() else status or _FLUSH_FAILED)
