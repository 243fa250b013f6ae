"""torchrun for another program: python -m metadist.distributed.torchrun OPTIONS SCRIPT WORDS.

It is torchrun itself, with the same options, less its report of a failure (the workers have said
what went wrong), with an exit status that tells one failure from another, and it ends with its
parent: its standard input is a pipe that the parent holds, and closing it ends the workers.
"""

import contextlib
import logging
import os
import signal
import sys
import threading
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.run import parse_args, run

from metadist.distributed.exiting import exit_whole

_TELLING = (2, 130, 143)
"""Exit statuses of workers that stand for the whole world; any other failure is 1."""


def main(words: list[str]) -> int:
    """Start a world and wait for its end.

    Args:
        words: torchrun's command line.

    Returns:
        0; the status 2, 130 or 143 of a worker that ended with it; 128 plus the number of a
        signal that this process got; else 1.
    """
    logging.disable(logging.ERROR)
    if hasattr(signal, "SIGUSR2"):  # SLURM's notice of the end is for the parent, which saves
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    arguments = parse_args(words)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        run(arguments)
    except ChildFailedError as error:
        _say_killed(error)
        _note_last_words(error)
        statuses = {failure.exitcode for failure in error.failures.values()}
        return next((status for status in _TELLING if status in statuses), 1)
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    except RendezvousError as error:
        print(f"error: the nodes did not meet ({error})", file=sys.stderr, flush=True)
        return 1
    return 0


def _say_killed(error: ChildFailedError) -> None:
    """A single worker that a signal ended has told nobody; in larger worlds the others do."""
    _, failure = error.get_first_failure()
    if len(error.failures) == 1 and failure.exitcode < 0 and failure.global_rank == 0:
        name = signal.Signals(-failure.exitcode).name
        print(f"error: rank 0 was ended by {name}", file=sys.stderr, flush=True)


def _note_last_words(error: ChildFailedError) -> None:
    """Leave what a worker said in the file that METADIST_LAST_WORDS names."""
    path = os.environ.get("METADIST_LAST_WORDS")
    said = [failure.message for failure in error.failures.values()]
    texts = [each["message"] for each in said if isinstance(each, dict) and "message" in each]
    if path and texts:
        with contextlib.suppress(OSError):
            Path(path).write_text(str(texts[0]), encoding="utf-8")


def _end_with_parent() -> None:
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    exit_whole(main(sys.argv[1:]))
