"""The end of a process that has used torch.distributed."""

import atexit
import contextlib
import multiprocessing
import os
import sys
from typing import NoReturn


def exit_whole(status: int) -> NoReturn:
    """`sys.exit`, without taking the interpreter apart behind it.

    A thread that comes back from C++ while Python is taken apart (from the world's store, from
    RPC's end) aborts the process: "terminate called without an active exception", and a finished
    run counts as failed (https://github.com/pytorch/pytorch/issues/38228). Threads that are not
    daemons are waited for and exit handlers run as ever. Any process, from its main thread.

    Args:
        status: the exit status.

    Raises:
        SystemExit: always.
    """
    if multiprocessing.parent_process() is None:  # multiprocessing ends its own processes like this
        atexit.register(_end, status)
    sys.exit(status)


def _end(status: int) -> NoReturn:
    atexit.unregister(_end)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # none, broken, closed
            stream.flush()
    os._exit(status)
