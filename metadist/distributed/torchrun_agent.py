"""torchrun as a subprocess: python -m metadist.distributed.torchrun_agent OPTIONS SCRIPT ARGUMENTS.

It has the same options as torchrun, but prints no failure report (the workers report their errors),
and its exit status depends on the failure. Its standard input is a pipe from the parent process:
closing the pipe ends the workers.
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
    """Run the workers and wait until they have ended.

    Args:
        arguments: torchrun's command line.

    Returns:
        0; 130 or 143 if the first worker to end was stopped by a signal; 2 after a user error; 128
        plus the number of a signal that this process received; else 1.
    """
    logging.disable(logging.ERROR)
    # SLURM's warning is for the parent process, which saves.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        run(parse_args(arguments))
    except ChildFailedError as error:
        kill_message = unreported_kill(error)
        if kill_message:
            print(f"error: {kill_message}", file=sys.stderr, flush=True)
        _write_error_file(error, kill_message)
        return status_of(error)
    except SignalException as error:
        return 128 + int(error.sigval)
    except RendezvousError as error:
        print(f"error: the rendezvous of the nodes failed ({error})", file=sys.stderr, flush=True)
        return 1
    return 0


def status_of(error: ChildFailedError) -> int:
    """The exit status after a failure; see `main`. It depends on the first failure, because the
    agent then stops the other workers.
    """
    _, first_failure = error.get_first_failure()
    if first_failure.exitcode in SIGNAL_STATUSES:
        return first_failure.exitcode
    statuses = {failure.exitcode for failure in error.failures.values()}
    user_error = USER_ERROR_STATUS in statuses and first_failure.exitcode >= 0
    return USER_ERROR_STATUS if user_error else FAILURE_STATUS


def unreported_kill(error: ChildFailedError) -> str:
    """A sentence about the worker that a signal killed, if no other worker reported it; else ""."""
    rank, first_failure = error.get_first_failure()
    failures = [failure for failure in error.failures.values() if failure is not first_failure]
    statuses = {failure.exitcode for failure in failures}
    reported = any(status > 0 and status not in SIGNAL_STATUSES for status in statuses)
    if first_failure.exitcode >= 0 or reported:
        return ""
    return f"rank {rank} was killed by {_signal_name(-first_failure.exitcode)}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _write_error_file(error: ChildFailedError, kill_message: str) -> None:
    """Write the kill message, or the first failure, to the file that METADIST_ERROR_FILE names."""
    path = os.environ.get("METADIST_ERROR_FILE")
    messages: list[Any] = [failure.message for failure in error.failures.values()]
    texts = [item["message"] for item in messages if isinstance(item, dict) and "message" in item]
    if path and (kill_message or texts):
        with contextlib.suppress(OSError):
            Path(path).write_text(kill_message or str(texts[0]), encoding="utf-8")


def _end_with_parent() -> None:
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    exit_without_finalizing(main(sys.argv[1:]))
