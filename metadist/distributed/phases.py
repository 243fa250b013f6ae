"""What this process is busy with, phase by phase: `with phase("data"): …`.

Nothing is recorded, and a phase costs a look at one variable, unless a step is recorded
(`recorded`). Then each phase's seconds are added up, without those of the phases inside it, and in
a trace the phases are named ranges among the operations.
"""

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

from metadist.errors import UserError

Phase = Literal[
    "data",
    "send",
    "support",
    "adapt",
    "query",
    "task",
    "backward",
    "reduce",
    "wait",
    "outer step",
    "log",
    "other",
]
"""In the order of a step. "task" is a task's forward pass where it cannot be told apart."""

Recording = Literal["no", "clock", "trace"]
"""What is recorded of a step: nothing, the phases' seconds, or a trace of every operation, which
slows the step down."""


class _Recorder:
    """The phases of one process."""

    def __init__(self) -> None:
        self.seconds: dict[Phase, float] = {}
        self.profile: profile | None = None
        self._lock = threading.Lock()
        self._mine = threading.local()

    @property
    def _open(self) -> list[tuple[Phase, record_function]]:
        """This thread's open phases, the innermost last."""
        if not hasattr(self._mine, "open"):
            self._mine.open = []
        return self._mine.open

    def _bank(self) -> None:
        """Add the time since the last change to the innermost phase."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # what the phase started belongs to it
        now = time.perf_counter()
        if self._open and self.profile is None:
            self.add(self._open[-1][0], now - self._mine.since)
        self._mine.since = now

    def add(self, name: Phase, seconds: float) -> None:
        with self._lock:
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def settle(self) -> None:
        """Count once what was done side by side: a share takes its time from the caller's waiting,
        and where that was shorter, from the sending (and so on) during which it had begun.
        """
        for name, before in (("wait", "send"), ("send", "other")):
            if (seconds := self.seconds.get(name, 0.0)) < 0:
                self.seconds[name] = 0.0
                self.add(before, seconds)

    def begin(self, name: Phase) -> None:
        self._bank()
        span = record_function(name)
        span.__enter__()
        self._open.append((name, span))

    def end(self) -> None:
        self._bank()
        self._open.pop()[1].__exit__(None, None, None)

    @contextlib.contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        self.begin(name)
        try:
            yield
        finally:
            self.end()

    def start_trace(self) -> None:
        if self.profile is None:
            kinds = [ProfilerActivity.CPU]
            kinds += [ProfilerActivity.CUDA] if torch.cuda.is_initialized() else []
            # Visits run on other threads than the loop.
            every_thread = _ExperimentalConfig(profile_all_threads=True)
            self.profile = profile(activities=kinds, experimental_config=every_thread)
            self.profile.start()

    def stop_trace(self, path: Path) -> None:
        if self.profile is not None:
            self.profile.stop()
            path.parent.mkdir(parents=True, exist_ok=True)
            self.profile.export_chrome_trace(str(path))


_recorder: _Recorder | None = None
"""What has been recorded in this process so far."""
_found: dict[Phase, float] = {}
"""What had been, when the recording was finished."""
_active: _Recorder | None = None
"""The same, while a recorded step is under way."""
_nothing = contextlib.nullcontext()


def get_ready_to_record() -> None:
    """Forget what was recorded before, at the start of a run. Every rank, on its main thread: there
    the library that records traces wants to begin; and it is to say nothing.
    """
    global _recorder, _found
    left, _recorder, _found = _recorder, None, {}
    if left is not None and left.profile is not None:  # of a run that was stopped
        left.profile.stop()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(activities=[ProfilerActivity.CPU]):
        pass


def phase(name: Phase) -> contextlib.AbstractContextManager[None]:
    """What is done inside belongs to a phase. Any rank, any thread."""
    return _nothing if _active is None else _active.phase(name)


def is_recorded() -> bool:
    """Whether a recorded step is under way in this process."""
    return _active is not None


def change_phase(name: Phase) -> None:
    """End this thread's innermost phase and begin another in its place, in a recorded step."""
    if _active is not None:
        _active.end()
        _active.begin(name)


@contextlib.contextmanager
def recorded(what: Recording) -> Iterator[None]:
    """A step, or this worker's part of one. Inside a recorded step it changes nothing.

    Args:
        what: "no", "clock", or "trace", which goes on until `finish_recording`.
    """
    global _recorder, _active
    if what == "no":
        yield
        return
    outermost = _active is None
    if outermost:
        _recorder = _active = _recorder or _Recorder()
        if what == "trace":
            _recorder.start_trace()
    recorder = _active
    started = time.perf_counter()
    begins = not recorder._open  # the step, or a visit, which has a thread of its own
    try:
        with recorder.phase("other") if begins else _nothing:
            yield
    finally:
        if begins and not outermost and recorder.profile is None:
            # The caller waits on its own thread while this worker does its share (`settle`).
            recorder.add("wait", started - time.perf_counter())
        if outermost:
            _active = None


def finish_recording(trace: Path) -> dict[Phase, float]:
    """The seconds of each phase in the recorded steps; {} if there was none.

    Called again, it gives the same.

    Args:
        trace: where to write the trace (`….json.gz`), if there is one.

    Raises:
        UserError: it cannot be written.
    """
    global _recorder, _found
    done, _recorder = _recorder, None
    if done is None:
        return _found
    try:
        done.stop_trace(trace)
    except OSError as error:
        raise UserError(
            f"{trace} could not be written ({error.strerror}): free some space, or set "
            "trainer.profile=false."
        ) from None
    done.settle()
    _found = done.seconds
    return _found
