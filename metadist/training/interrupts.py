"""Stopping between two iterations when the user or the cluster asks for it."""

import signal
import threading
import time
from types import FrameType, TracebackType

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
    well, so repetitions within a second count as one; a later one is obeyed at once. Outside of
    the main thread signals are left alone.

    Attributes:
        number: the signal that came first, 0 as long as none has.
    """

    def __init__(self) -> None:
        self.number = 0
        self._since = 0.0
        self._previous: dict[int, object] = {}

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
        if not self.number:
            self.number, self._since = number, time.monotonic()
        elif time.monotonic() - self._since > 1.0:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
