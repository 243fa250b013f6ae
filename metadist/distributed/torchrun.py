"""torchrun as a subprocess: python -m metadist.distributed.torchrun OPTIONS SCRIPT ARGUMENTS.

It is torchrun with the same options, but without its failure report (the workers report their
errors) and with an exit status that depends on the failure. Its standard input is a pipe from the
parent process: closing it ends the workers.
"""

import contextlib
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.run import parse_args, run

from metadist.distributed.process_exit import exit_without_finalizing
from metadist.errors import FAILURE_STATUS, SIGNAL_STATUSES, USER_ERROR_STATUS


def main(arguments: list[str]) -> int:
    """Run the workers and wait for their end.

    Args:
        arguments: torchrun's command line.

    Returns:
        0; 130 or 143 if the first worker to end was stopped by a signal; 2 after a user error; 128
        plus the number of a signal that this process received; else 1.
    """
    logging.disable(logging.ERROR)
    if hasattr(signal, "SIGUSR2"):  # SLURM's warning is for the parent, which saves
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        run(parse_args(arguments))
    except ChildFailedError as error:
        killed = unreported_kill(error)
        if killed:
            print(f"error: {killed}", file=sys.stderr, flush=True)
        _write_error_file(error, killed)
        return status_of(error)
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    except RendezvousError as error:
        print(f"error: the rendezvous of the nodes failed ({error})", file=sys.stderr, flush=True)
        return 1
    return 0


def status_of(error: ChildFailedError) -> int:
    """The exit status after a failure, see `main`. The first failure decides: the agent stops the
    other workers.
    """
    _, first = error.get_first_failure()
    if first.exitcode in SIGNAL_STATUSES:
        return first.exitcode
    statuses = {failure.exitcode for failure in error.failures.values()}
    user_error = USER_ERROR_STATUS in statuses and first.exitcode >= 0
    return USER_ERROR_STATUS if user_error else FAILURE_STATUS


def unreported_kill(error: ChildFailedError) -> str:
    """A sentence about the worker that a signal killed, if no other worker reported it; else ""."""
    rank, first = error.get_first_failure()
    others = {failure.exitcode for failure in error.failures.values() if failure is not first}
    if first.exitcode >= 0 or any(code > 0 and code not in SIGNAL_STATUSES for code in others):
        return ""
    return f"rank {rank} was killed by {_signal_name(-first.exitcode)}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _write_error_file(error: ChildFailedError, killed: str) -> None:
    """Write the first failure to the file that METADIST_ERROR_FILE names."""
    path = os.environ.get("METADIST_ERROR_FILE")
    messages: list[Any] = [failure.message for failure in error.failures.values()]
    texts = [each["message"] for each in messages if isinstance(each, dict) and "message" in each]
    if path and (killed or texts):
        with contextlib.suppress(OSError):
            Path(path).write_text(killed or str(texts[0]), encoding="utf-8")


def _end_with_parent() -> None:
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    exit_without_finalizing(main(sys.argv[1:]))
