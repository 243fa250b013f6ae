"""The end of a process that has used torch.distributed."""

import atexit
import multiprocessing
import os
import sys
from typing import NoReturn

_FLUSH_FAILED = 120
"""Python's exit status when what was printed could not be written."""


def exit_whole(status: int) -> NoReturn:
    """`sys.exit`, without taking the interpreter apart behind it.

    A thread that comes back from C++ while Python is taken apart (from the world's store, from
    RPC's end) aborts the process: "terminate called without an active exception", and a finished
    run counts as failed (https://github.com/pytorch/pytorch/issues/38228). Threads that are not
    daemons are waited for and exit handlers run as ever. For the last statement of a program, on
    its main thread: whoever catches the SystemExit has no say in the exit status any more.

    Args:
        status: the exit status.

    Raises:
        SystemExit: always.
    """
    if multiprocessing.parent_process() is None:  # multiprocessing ends its own processes like this
        atexit.register(_end, status)
    sys.exit(status)


def flush_streams() -> bool:
    """Whether all that was printed could be written, as far as there is somewhere to print."""
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
