"""What ended a run, said once: by the rank on which it went wrong, or by rank zero for all."""

import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import NoReturn

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from metadist.config.hydra_errors import describe_error, raised_by_hydra
from metadist.distributed import PeerLost, RemoteError, get_rank, get_world_size
from metadist.distributed.exiting import exit_whole, flush_streams
from metadist.distributed.job import current_job
from metadist.distributed.lost import SomePeerLost
from metadist.distributed.meeting import AllGaveUp, meet
from metadist.distributed.world import host_name
from metadist.errors import UserError
from metadist.launchers.agent import end_stuck_agent
from metadist.training import Interrupted

USER_ERROR_STATUS = 2
"""Exit status after an error that the user can mend."""

FAILURE_STATUS = 1
"""Exit status after any other error."""

_TRACEBACK = "METADIST_TRACEBACK"

_LEAVE_SECONDS = 3.0
"""How long a process that has failed may take to end in good order."""

_floor = threading.Lock()


class Elsewhere(Exception):
    """Another rank failed, and says why; the text, if any, is for a sweep's record."""


class WorldEnded(Exception):
    """A world that this process started did not end well, and has said why.

    Attributes:
        exit_status: what `Launcher.run` returned, or 128 plus the number of a signal that this
            process got.
    """

    def __init__(self, exit_status: int) -> None:
        super().__init__(exit_status)
        self.exit_status = exit_status

    def __str__(self) -> str:
        return f"its processes ended with status {self.exit_status}"


def wants_traceback() -> bool:
    """Whether HYDRA_FULL_ERROR=1 asked for tracebacks of every error. The first call decides, here
    and in processes started later: Hydra itself is always to raise, not to print.
    """
    os.environ.setdefault(_TRACEBACK, os.environ.get("HYDRA_FULL_ERROR", "0"))
    os.environ["HYDRA_FULL_ERROR"] = "1"
    return os.environ[_TRACEBACK] == "1"


def say(error: Exception, tracebacks: bool, in_job: bool) -> int:
    """Say what went wrong as far as it is this rank's to say. Any rank, in its main thread.

    Args:
        error: what was raised.
        tracebacks: of errors that are one sentence, too.
        in_job: whether the ranks had met for the job already. An OSError before that comes from
            Hydra, which could not make the run's directory.

    Returns:
        The exit status.
    """
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):  # torchrun ends all when one has failed
            signal.signal(number, signal.SIG_IGN)
    if isinstance(error, OmegaConfBaseException) and isinstance(error.__cause__, PeerLost):
        error = error.__cause__  # raised by a resolver
    if isinstance(error, Elsewhere | AllGaveUp):
        _let_speak()
        return FAILURE_STATUS
    if isinstance(error, WorldEnded):
        return error.exit_status
    if isinstance(error, Interrupted):
        _say_for_all(str(error), in_job)
        return error.exit_status
    if isinstance(error, PeerLost):
        _say_lost(error)
        return FAILURE_STATUS
    if _is_users(error, in_job):
        if tracebacks:
            traceback.print_exception(error)
        _say_for_all(f"error: {describe_error(error)}", in_job)
        return USER_ERROR_STATUS
    if isinstance(error, RemoteError) and not tracebacks:
        _say_own(f"error: {error}")
    else:
        lines = "".join(traceback.format_exception(error)).rstrip()
        _say_own(f"error: {_here()} failed:\n{lines}")
    return FAILURE_STATUS


def _is_users(error: Exception, in_job: bool) -> bool:
    """Whether an error is one that the user can mend."""
    return isinstance(error, UserError | HydraException | OmegaConfBaseException) or (
        not in_job and (isinstance(error, OSError) or raised_by_hydra(error))
    )


def say_and_go_on(error: Exception, in_job: bool, then: str) -> None:
    """Say what went wrong, and be ready for another job. Any rank, in its main thread.

    Args:
        error: what was raised.
        in_job: as of `say`.
        then: what rank zero says after it.
    """
    numbers = (signal.SIGTERM, signal.SIGINT)
    handlers = [signal.getsignal(number) for number in numbers]
    say(error, wants_traceback(), in_job)
    for number, handler in zip(numbers, handlers, strict=True):
        signal.signal(number, handler)
    if _floor.locked():
        _floor.release()
    if get_rank() == 0:
        print(then, file=sys.stderr, flush=True)


def speak(text: str) -> None:
    """Say what is the last word on a job or sweep, on standard error and to torchrun."""
    sys.stdout.flush()
    print(text, file=sys.stderr, flush=True)
    _tell_torchrun(text.removeprefix("error: "))


def sentence_of(error: Exception, in_job: bool) -> tuple[str, int]:
    """What a table says of an error, in one line, and its exit status."""
    if isinstance(error, WorldEnded):
        return str(error), error.exit_status
    if isinstance(error, Elsewhere):
        return str(error), FAILURE_STATUS
    if _is_users(error, in_job):
        return describe_error(error), USER_ERROR_STATUS
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500], FAILURE_STATUS


def end_process(sentence: str) -> None:
    """End this process in the middle of whatever it does, because another one is lost.

    Args:
        sentence: who was lost; "" when another rank says what happened.
    """
    if not current_job().is_reachable():
        end_stuck_agent()
    if sentence and current_job().claim_cause():
        if not _floor.acquire(blocking=False):
            time.sleep(_LEAVE_SECONDS)  # the main thread is speaking
        else:
            with contextlib.suppress(Exception):
                print(f"error: {_here()}: {sentence}", file=sys.stderr, flush=True)
                _let_others_hear()
    os._exit(FAILURE_STATUS)


def leave(status: int, is_program: bool) -> NoReturn:
    """End the process; after an error within seconds: threads that are stuck in a call are not
    waited for then.

    Args:
        status: the exit status.
        is_program: nothing comes after it in this process (`exit_whole`).
    """
    if status:
        flush_streams()
        last = threading.Timer(_LEAVE_SECONDS, os._exit, [status])
        last.daemon = True
        last.start()
        if threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer"):
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # where no Python thread runs any more
            signal.setitimer(signal.ITIMER_REAL, 2 * _LEAVE_SECONDS)
    (exit_whole if is_program else sys.exit)(status)


def _here() -> str:
    return f"rank {get_rank()} on {host_name()}"


def _say_lost(error: PeerLost) -> None:
    """Who was lost, unless the lost one has said why it went."""
    job = current_job()
    patience, lost = 2.5, ""
    if isinstance(error, SomePeerLost):  # which one is known once its signs of life fail
        deadline = time.monotonic() + 5.0
        while time.monotonic() < deadline and not (job.silent_ranks() or job.cause_is_claimed()):
            time.sleep(0.1)
        # Rank zero looks at all ranks, the others at rank zero alone.
        patience = 0.0 if get_rank() == 0 or job.silent_ranks() else 2.0
        lost = ", ".join(job.silent_ranks())
    words = f"{lost} was lost; {error}" if lost else str(error)
    _say_own(f"error: {_here()}: {words}", patience)


def _say_own(text: str, patience: float = 0.0) -> None:
    """Say what this rank alone has met, unless another rank has named a cause before.

    Args:
        text: what to say.
        patience: seconds to give a rank that left the time to say why.
    """
    job = current_job()
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline and not job.cause_is_claimed():
        time.sleep(0.05)
    if job.claim_cause():
        _print(text)
        _let_others_hear()
    else:
        _let_speak()


def _say_for_all(sentence: str, in_job: bool) -> None:
    """Rank zero says a sentence that every rank has; another one if only it has it. The others
    wait until it is said, for torchrun ends all ranks as soon as the first of them has ended.
    """
    if not in_job:
        _say_before_job(sentence)
    elif get_rank() == 0 or current_job().owns_cause:
        _say_own(sentence)
    else:
        _say_own(sentence, patience=1.5)


def _say_before_job(sentence: str) -> None:
    if get_rank() == 0:
        _print(sentence)
    if get_world_size() > 1:
        try:
            meet("last words", 5.0)  # rank zero comes when it has spoken
        except (PeerLost, UserError):
            if get_rank() != 0:
                _print(f"{sentence} (rank {get_rank()})")


def _print(text: str) -> None:
    if _floor.acquire(blocking=False) and text:
        speak(text)
        with contextlib.suppress(RuntimeError):
            current_job().note_said()


def _tell_torchrun(text: str) -> None:
    """Have torchrun's report of the failure end with what was said, instead of with nothing."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    word = {"py_callstack": text, "timestamp": str(int(time.time()))}
    with contextlib.suppress(OSError):
        Path(path).write_text(
            json.dumps({"message": {"message": text, "extraInfo": word}}), encoding="utf-8"
        )


def _let_others_hear() -> None:
    """Ranks on other machines learn that the cause is said while the store is still there."""
    if len(set(current_job().hosts)) > 1:
        time.sleep(_LEAVE_SECONDS)


def _let_speak() -> None:
    """Wait until the rank that names the cause has done so, and has ended first."""
    job, deadline = current_job(), time.monotonic() + 5.0
    while time.monotonic() < deadline and not job.cause_is_said():
        time.sleep(0.05)
    time.sleep(0.5)
