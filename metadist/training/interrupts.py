"""Stopping between two iterations when the user or the cluster asks for it."""

import signal
import threading
import time
from types import FrameType, TracebackType

from metadist.distributed.job import current_job

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(Exception):
    """The run was asked to stop, and has saved what it had.

    Attributes:
        exit_status: 128 plus the signal's number, as shells have it: 130 or 143.
    """

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.exit_status = 128 + number


class StopRequests:
    """Context manager that notes SIGINT and SIGTERM instead of dying of them.

    torchrun passes a signal on to all its processes, and a terminal sends Ctrl-C to each as
    well, so repetitions within a second count as one; a later one is obeyed at once. A signal to
    a single rank reaches rank zero through the job. Outside of the main thread signals are left
    alone.
    """

    def __init__(self) -> None:
        self._number = 0
        self._since = 0.0
        self._previous: dict[int, object] = {}

    @property
    def number(self) -> int:
        """The signal that came first, here or (on rank zero) on any rank; 0 if none has."""
        return self._number or current_job().stop_signal

    def __enter__(self) -> "StopRequests":
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self._number:
            self._number, self._since = number, time.monotonic()
            current_job().request_stop(number)
        elif time.monotonic() - self._since > 1.0:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
