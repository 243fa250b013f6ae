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

_USER_ERROR = 2
_STOPPED = (130, 143)
"""Exit statuses of workers that may stand for the whole world's (`status_of`); any other is 1."""


def main(words: list[str]) -> int:
    """Start a world and wait for its end.

    Args:
        words: torchrun's command line.

    Returns:
        0; 130 or 143 if the first worker to end had been stopped; 2 if one ended with it; 128
        plus the number of a signal that this process got; else 1.
    """
    logging.disable(logging.ERROR)
    if hasattr(signal, "SIGUSR2"):  # SLURM's notice of the end is for the parent, which saves
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    arguments = parse_args(words)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        run(arguments)
    except ChildFailedError as error:
        killed = killed_unheard(error)
        if killed:
            print(f"error: {killed}", file=sys.stderr, flush=True)
        _note_last_words(error, killed)
        return status_of(error)
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    except RendezvousError as error:
        print(f"error: the nodes did not meet ({error})", file=sys.stderr, flush=True)
        return 1
    return 0


def status_of(error: ChildFailedError) -> int:
    """What a world's failure comes to: see `main`. Of those that ended later nothing follows, for
    the agent stops whoever is left when the first has ended.
    """
    _, first = error.get_first_failure()
    if first.exitcode in _STOPPED:
        return first.exitcode
    statuses = {failure.exitcode for failure in error.failures.values()}
    return _USER_ERROR if _USER_ERROR in statuses and first.exitcode >= 0 else 1


def killed_unheard(error: ChildFailedError) -> str:
    """Which worker a signal ended, in a sentence, if none of the others has told; else ""."""
    rank, first = error.get_first_failure()
    others = {failure.exitcode for failure in error.failures.values() if failure is not first}
    if first.exitcode >= 0 or any(code > 0 and code not in _STOPPED for code in others):
        return ""
    return f"rank {rank} was ended by {signal.Signals(-first.exitcode).name}"


def _note_last_words(error: ChildFailedError, killed: str) -> None:
    """Leave what was said in the file that METADIST_LAST_WORDS names."""
    path = os.environ.get("METADIST_LAST_WORDS")
    said = [failure.message for failure in error.failures.values()]
    texts = [each["message"] for each in said if isinstance(each, dict) and "message" in each]
    if path and (killed or texts):
        with contextlib.suppress(OSError):
            Path(path).write_text(killed or str(texts[0]), encoding="utf-8")


def _end_with_parent() -> None:
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    exit_whole(main(sys.argv[1:]))
