"""The end of a process: closing with a deadline after an error, and the exit."""

import atexit
import multiprocessing
import os
import sys
from collections.abc import Callable
from concurrent.futures import Future
from typing import NoReturn

from metadist.deadlines import call_within

CLOSE_SECONDS = 3.0
"""Seconds that closing may take after an error. Calls, collectives and uploads that are stuck after
this time are abandoned."""

_calls: list[Future[object]] = []
"""The calls that had not returned in time."""

_finalizes = True
"""Whether Python is finalized at the end of this process."""

_FLUSH_FAILED = 120
"""Python's exit status when standard output could not be written."""


def close_within_seconds(
    function: Callable[[], object], seconds: float | None = None
) -> Future[object]:
    """Call a function, and wait at most some seconds for it. Any rank may call it.

    Args:
        function: the function that leaves RPC or a process group, or closes a logger.
        seconds: the longest wait. Default: `CLOSE_SECONDS`, for closing after an error.

    Returns:
        See `call_within`. After an error it can be ignored: the earlier error is the one to report.
    """
    call = call_within(CLOSE_SECONDS if seconds is None else seconds, function)
    if not call.done():
        _calls.append(call)
    return call


def all_closed() -> bool:
    """Whether all functions that `close_within_seconds` called have returned, so that another job
    can run in this process.
    """
    return all(call.done() for call in _calls)


def exit_without_finalizing(status: int) -> NoReturn:
    """`sys.exit`, without finalizing the interpreter.

    A thread that returns from C++ (from the job's store or RPC's shutdown) while Python is being
    finalized aborts the process with "terminate called without an active exception", so that a
    finished run counts as failed (https://github.com/pytorch/pytorch/issues/38228). Non-daemon
    threads are joined and exit handlers run as usual. Call this as a program's last statement, in
    its main thread: catching the SystemExit does not change the exit status.

    Args:
        status: the exit status.

    Raises:
        SystemExit: always.
    """
    if multiprocessing.parent_process() is None:  # multiprocessing's processes already end so
        atexit.register(_end, status)
    sys.exit(status)


def finalizes() -> bool:
    """Whether the end of this process finalizes the interpreter. Exit handlers call it."""
    return _finalizes


def flush_streams() -> bool:
    """Flush the standard streams, and return whether it succeeded."""
    written = True
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except OSError:
            written = False
    return written


def _end(status: int) -> NoReturn:
    global _finalizes
    _finalizes = False
    atexit.unregister(_end)
    atexit._run_exitfuncs()
    end_process(status)


def end_process(status: int) -> NoReturn:
    """Flush the standard streams, and end the process at once."""
    os._exit(status if flush_streams() else status or _FLUSH_FAILED)
