"""Reports the first failure of a job once: the rank that failed first, or rank zero if all ranks
have the error, prints it and writes it to torchrun's error file.

This is like torchelastic's `@record`, but works across nodes: a rank that fails claims the first
failure in the job's store; the others wait until it is reported and exit without a message.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import NoReturn

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from metadist.config.hydra_errors import describe_error, raised_by_hydra
from metadist.deadlines import exit_after, wait_until
from metadist.distributed import RemoteError, WorkerLostError, get_rank, get_world_size
from metadist.distributed.errors import RendezvousClosedError
from metadist.distributed.job import current_job
from metadist.distributed.process_exit import exit_without_finalizing, flush_streams
from metadist.distributed.rendezvous import rendezvous
from metadist.distributed.world import host_name, parent_is_agent
from metadist.errors import (
    FAILURE_STATUS,
    FULL_TRACEBACKS,
    USER_ERROR_STATUS,
    UserError,
    one_line,
    printable,
    user_traceback,
)
from metadist.files import discard_output
from metadist.training import Interrupted
from metadist.training.signals import preserved_handlers

_EXIT_SECONDS = 3.0
"""Seconds that a failed process may take for an orderly exit."""

_REPORT_SECONDS = 5.0
"""Seconds that a rank waits for another rank's report."""

END_SECONDS = 10.0
"""Seconds after which `abort_process` ends the process even if it cannot report why."""

_report_lock = threading.Lock()  # held from this process's first report on

_error_file: Path | None = None


class RemoteRankFailed(Exception):
    """Another rank failed and reports the error. The message, if any, is for a sweep's record."""


class WorkerGroupFailed(Exception):
    """The workers that this process started failed and have reported the error.

    Attributes:
        exit_status: the exit status that `Launcher.run` returned, or 128 plus the number of a
            signal that this process received.
    """

    def __init__(self, exit_status: int) -> None:
        super().__init__(exit_status)
        self.exit_status = exit_status

    def __str__(self) -> str:
        return f"its processes ended with status {self.exit_status}"


def wants_traceback() -> bool:
    """Whether HYDRA_FULL_ERROR=1 requests tracebacks of all errors, with all frames.

    The first call determines the result for this process and processes started later, and makes
    Hydra raise errors instead of printing them.
    """
    os.environ.setdefault(FULL_TRACEBACKS, os.environ.get("HYDRA_FULL_ERROR", "0"))
    os.environ["HYDRA_FULL_ERROR"] = "1"
    return os.environ[FULL_TRACEBACKS] == "1"


def report_error(error: Exception | Interrupted, tracebacks: bool, in_job: bool) -> int:
    """Print an error if this rank must report it. Any rank calls it in its main thread.

    Args:
        error: the error.
        tracebacks: whether to print the tracebacks of user errors too.
        in_job: whether the rendezvous of the job was complete. An OSError before that comes from
            Hydra, which could not create the run's directory.

    Returns:
        The exit status.
    """
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):  # torchrun stops all ranks after a failure
            signal.signal(number, signal.SIG_IGN)
    error = _raised_by_resolver(error)
    if isinstance(error, WorkerGroupFailed):
        return error.exit_status
    if isinstance(error, BrokenPipeError) and not in_job:  # such as `--help | head`
        discard_output()
        return 128 + signal.SIGPIPE
    if isinstance(error, RemoteRankFailed | RendezvousClosedError):
        _wait_until_reported()
        return FAILURE_STATUS
    if isinstance(error, Interrupted):
        _report_shared(str(error), in_job)
        return error.exit_status
    if is_user_error(error, in_job):
        if tracebacks:
            traceback.print_exception(error)
        _report_shared(f"error: {describe_error(error)}", in_job)
        return USER_ERROR_STATUS
    if isinstance(error, WorkerLostError):
        _report_lost(error)
    elif isinstance(error, RemoteError) and not tracebacks:
        _report(f"error: {error}")
    else:
        _report(_prefixed(f" failed:\n{user_traceback(error).rstrip()}"))
    return FAILURE_STATUS


def report_error_and_continue(
    error: Exception | Interrupted, in_job: bool, message: str, if_ended: str
) -> None:
    """Report an error, and prepare for another job. Any rank calls it in its main thread.

    Args:
        error: the error.
        in_job: whether the rendezvous of the job was complete; see `report_error`.
        message: the message that rank zero prints after the error.
        if_ended: the error that rank zero prints if a rank does not leave this job.
    """
    with preserved_handlers():
        report_error(error, wants_traceback(), in_job)
    if _report_lock.locked():
        _report_lock.release()
    current_job().extend_grace(if_ended if get_rank() == 0 else "")
    if get_rank() == 0:
        print(message, file=sys.stderr, flush=True)


def record_error_in(path: Path | None) -> None:
    """Also write the next error that this process reports to a file. Any rank may call it.

    Args:
        path: the file; None for none.
    """
    global _error_file
    _error_file = path


def print_error(text: str) -> None:
    """Print the final message of a job or sweep to standard error and torchrun's error file."""
    global _error_file
    text = printable(text)
    for write in (sys.stdout.flush, lambda: print(text, file=sys.stderr, flush=True)):
        with contextlib.suppress(OSError, ValueError):  # closed, or the disk is full
            write()
    message = text.removeprefix("error: ")
    file, _error_file = _error_file, None
    if file is not None:
        with contextlib.suppress(OSError):
            file.write_text(f"{message}\n", encoding="utf-8")
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        # torchrun prints `py_callstack` below the message that this process has printed.
        last_line = message.strip().rpartition("\n")[2]
        extra = {"py_callstack": last_line, "timestamp": str(int(time.time()))}
        record = {"message": {"message": message, "extraInfo": extra}}
        try:
            Path(path).write_text(json.dumps(record), encoding="utf-8")
        except OSError:  # the disk is full: torchrun needs a whole file or none
            with contextlib.suppress(OSError):
                Path(path).unlink()


def error_summary(error: Exception | Interrupted, in_job: bool) -> tuple[str, int]:
    """An error as one line, for tables, and its exit status."""
    if isinstance(error, WorkerGroupFailed):
        return str(error), error.exit_status
    if isinstance(error, RemoteRankFailed):
        return str(error), FAILURE_STATUS
    if is_user_error(error, in_job):
        return describe_error(error), USER_ERROR_STATUS
    return f"{type(error).__name__}: {one_line(error)}", FAILURE_STATUS


def abort_process(message: str) -> None:
    """End this process within `END_SECONDS`, whatever it is doing. `Heartbeat` calls it.

    Args:
        message: a sentence about the rank, the store or the agent that was lost; "" if another rank
            reports the failure.
    """
    exit_after(END_SECONDS, FAILURE_STATUS)  # printing may block
    if not current_job().is_reachable():
        _kill_stuck_agent()
    if not message and current_job().message_if_ended:
        print_error(f"error: {current_job().message_if_ended}")
    if message:
        with contextlib.suppress(Exception):
            _report(_prefixed(f": {message}"))
    os._exit(FAILURE_STATUS)


def exit_process(status: int, is_program: bool) -> NoReturn:
    """End the process. After an error, a program ends within seconds, without waiting for stuck
    threads. If this process runs other code afterwards, SystemExit is raised.

    Args:
        status: the exit status.
        is_program: whether no other code follows in this process (`exit_without_finalizing`).
    """
    if status and is_program:
        flush_streams()
        exit_after(_EXIT_SECONDS, status)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # for when no Python thread runs any more
            signal.setitimer(signal.ITIMER_REAL, 2 * _EXIT_SECONDS)
    if is_program:
        exit_without_finalizing(status)
    if status and threading.current_thread() is threading.main_thread():
        # `report_error` has ignored the signals.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.exit(status)


def is_user_error(error: Exception | Interrupted, in_job: bool) -> bool:
    """Whether an error is reported in one sentence; see `report_error` for the arguments."""
    if isinstance(error, WorkerLostError):  # a subclass of OSError
        return False
    return isinstance(error, UserError | HydraException | OmegaConfBaseException) or (
        not in_job and (isinstance(error, OSError) or raised_by_hydra(error))
    )


def _raised_by_resolver(error: Exception | Interrupted) -> Exception | Interrupted:
    """The `WorkerLostError` of a resolver, which OmegaConf keeps as the context of its own error;
    else the error itself.
    """
    context: BaseException | None = error
    while isinstance(context, OmegaConfBaseException):
        context = context.__context__
    return context if isinstance(context, WorkerLostError) else error


def _prefixed(text: str) -> str:
    return f"error: rank {get_rank()} on {host_name()}{text}"


def _report_shared(text: str, in_job: bool) -> None:
    """Report an error that usually all ranks have; rank zero reports it first."""
    if in_job:
        is_first = get_rank() == 0 or current_job().owns_first_failure
        _report(text, 0.0 if is_first else 1.5)
        return
    try:
        rank, size = get_rank(), get_world_size()
    except UserError:  # RANK or WORLD_SIZE is wrong, so no other rank can be waited for
        rank, size = 0, 1
    if rank == 0:
        print_error(text)
    if size > 1:
        try:
            rendezvous("error report", _REPORT_SECONDS)  # rank zero prints before it joins
        except (WorkerLostError, UserError):
            if rank != 0:
                print_error(f"{text} (rank {rank})")


def _report_lost(error: WorkerLostError) -> None:
    """Report which rank was lost, unless that rank reports why it left."""
    job, silent_ranks = current_job(), ""
    seconds = 2.5
    if error.rank is None:
        # Rank zero watches all ranks; heartbeats of other nodes reach it one interval later.
        seconds = _REPORT_SECONDS + (1.0 if get_rank() == 0 else 2.0)

    def explained() -> bool:
        nonlocal silent_ranks
        silent_ranks = "" if error.rank is not None else ", ".join(job.silent_ranks())
        return bool(silent_ranks) or job.has_first_failure()

    if len(job.hosts) > 1:
        wait_until(explained, seconds, pause=0.1)
    _report(_prefixed(f": {silent_ranks} was lost; {error}" if silent_ranks else f": {error}"))


def _report(text: str, delay: float = 0.0) -> None:
    """Claim the first failure and print it, or wait until another rank or thread has done so.

    Args:
        text: the message.
        delay: seconds to wait for another rank to claim the first failure.
    """
    if delay:
        wait_until(current_job().has_first_failure, delay)
    if not _report_lock.acquire(blocking=False):
        time.sleep(_EXIT_SECONDS)
        return
    job = current_job()
    if not job.claim_first_failure():
        _wait_until_reported()
        return
    print_error(text)
    job.mark_reported()
    if len(set(job.hosts)) > 1:  # other machines' ranks read it while this one's store exists
        time.sleep(_EXIT_SECONDS)


def _wait_until_reported() -> None:
    """Wait for the report of the rank that failed first, and let that rank exit first."""
    wait_until(current_job().is_reported, _REPORT_SECONDS)
    if current_job().is_reported():
        record_error_in(None)  # that rank has written the file
    time.sleep(0.5)


_KILL_AGENT = """
for _ in $(seq 12); do
    sleep 0.5
    [ "$(cut -d ' ' -f 22 /proc/{pid}/stat 2> /dev/null)" = "{started}" ] || exit 0
done
kill -KILL {pid}
"""


def _kill_stuck_agent() -> None:
    """Kill torchrun's agent, this process's parent, if it has not ended in six seconds.

    An agent that has lost the network to the rendezvous ignores signals until the kernel closes its
    connection, a quarter of an hour later. Without an agent or /proc this does nothing.
    """
    pid = os.getppid()
    try:
        started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return
    if parent_is_agent():
        subprocess.Popen(
            ["sh", "-c", _KILL_AGENT.format(pid=pid, started=started)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
