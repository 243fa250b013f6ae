"""Stopping between two iterations on SIGINT or SIGTERM."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from metadist.distributed import get_rank
from metadist.distributed.job import current_job
from metadist.distributed.world import launched_by_torchrun

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(BaseException):
    """The run was stopped by a signal; in training, after saving a checkpoint.

    Like KeyboardInterrupt it is no `Exception`, which libraries may catch.

    Args:
        number: the signal's number.
        message: a text that says where the run stopped.
        how_to_resume: a text that follows the message. A sweep, which resumes as a whole, leaves it
            out.

    Attributes:
        message: the message without `how_to_resume`.
        exit_status: 128 plus the signal's number, as in shells: 130 or 143.
    """

    def __init__(self, number: int, message: str, how_to_resume: str = "") -> None:
        super().__init__(f"{message}: {how_to_resume}" if how_to_resume else message)
        self.message = message
        self.exit_status = 128 + number


@contextlib.contextmanager
def preserved_handlers() -> Iterator[None]:
    """Restore the handlers of SIGINT and SIGTERM after the block.

    Outside of the main thread, where no handler can be set, it does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


REPEATED_SECONDS = 1.0
"""torchrun forwards a signal to all its processes, and a terminal sends Ctrl-C to each as well:
repetitions within this time count as one signal."""


STOPPING = (
    "stopping after this iteration; a second Ctrl-C or SIGTERM ends the run now, without a "
    "checkpoint"
)

_STOPPED = "stopped by a second signal: the iterations since the last checkpoint are not saved"


class StopSignals:
    """The SIGINT and SIGTERM that arrived while they were recorded.

    Attributes:
        error_file: the file for the message of a run that a second signal ends; None for none.
    """

    def __init__(self, error_file: Path | None = None) -> None:
        self.error_file = error_file
        self._number = 0
        self._since = 0.0

    @property
    def number(self) -> int:
        """The first signal, of this rank or (on rank zero) of any rank; 0 for none."""
        return self._number or current_job().stop_signal

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Record signals in the block instead of ending the process.

        A repetition after `REPEATED_SECONDS` ends the process at once. Rank zero prints a line for
        both, except for a first SIGTERM under torchrun, which may follow another rank's failure. A
        signal to a single rank is passed to rank zero through the job. Outside of the main thread
        the handlers are not changed.
        """
        with preserved_handlers():
            if threading.current_thread() is threading.main_thread():
                for number in _SIGNALS:
                    signal.signal(number, self._record)
            yield

    def _record(self, number: int, frame: FrameType | None) -> None:
        if not self._number:
            self._number, self._since = number, time.monotonic()
            current_job().request_stop(number)
            # torchrun also sends SIGTERM after the failure of another rank, which is reported.
            if get_rank() == 0 and not (number == signal.SIGTERM and launched_by_torchrun()):
                write_line(STOPPING)
        elif time.monotonic() - self._since > REPEATED_SECONDS:
            if get_rank() == 0:
                write_line(_STOPPED)
                if self.error_file is not None:
                    with contextlib.suppress(OSError):
                        self.error_file.write_text(f"{_STOPPED}\n", encoding="utf-8")
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


def write_line(text: str) -> None:
    """Write a line to standard error, below a progress bar.

    A signal handler must not use `sys.stderr`: the code that it interrupts may be writing to it.
    """
    begin = "\n" if os.isatty(2) else ""
    with contextlib.suppress(OSError):
        os.write(2, f"{begin}{text}\n".encode())
