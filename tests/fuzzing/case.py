"""One case of the corpus: the command in a forked process, and its result."""

import os
import runpy
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import tiny

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_SECONDS = 60.0

SMALL = (*tiny.SMALL, "trainer.report=true")
"""Overrides with which a run takes about a second."""


class Case(NamedTuple):
    """An invalid input and the command that reads it.

    Attributes:
        kind: "configuration", "checkpoint", "archive", …
        name: short description.
        arguments: the command line after the script.
        expected: the error message must contain one of these; empty for no condition.
        script: path in the repository.
        recovers: the expected exit status is 0, with nothing on standard error.
        prepare: creates the files of the case; called just before it runs.
        folder: holds these files; removed afterwards.
    """

    kind: str
    name: str
    arguments: tuple[str, ...]
    expected: tuple[str, ...] = ()
    script: str = "experiments/maml.py"
    recovers: bool = False
    prepare: Callable[[], object] | None = None
    folder: Path | None = None


class Result(NamedTuple):
    """The result of a case.

    Attributes:
        case: the case.
        status: the exit status; the negative signal number if a signal ended the process.
        out: standard output.
        err: standard error.
        seconds: duration.
    """

    case: Case
    status: int
    out: str
    err: str
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether the result is as expected."""
        if "Traceback" in self.out + self.err or "CODE WAS RUN" in self.out + self.err:
            return False
        if self.case.recovers:
            return self.status == 0 and not self.err
        message = self.err.strip()
        expected = not self.case.expected or any(each in message for each in self.case.expected)
        one_sentence = message.startswith("error: ") and "\n" not in message
        return self.status == 2 and one_sentence and expected


def run_case(case: Case, scratch: Path) -> Result:
    """Run a case in a forked process whose current directory is `scratch`.

    The calling process must have no other threads.
    """
    if case.prepare is not None:
        case.prepare()
    try:
        return _fork_and_wait(case, scratch)
    finally:
        if case.folder is not None:
            shutil.rmtree(case.folder)


def _fork_and_wait(case: Case, scratch: Path) -> Result:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        started = time.monotonic()
        child = os.fork()
        if child == 0:
            _run_child(case, scratch, out.fileno(), err.fileno())
        status = _wait(child, started + TIMEOUT_SECONDS)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return Result(case, status, *texts, time.monotonic() - started)


def _run_child(case: Case, scratch: Path, out: int, err: int) -> None:
    """Run the script in the child process; does not return."""
    status: object = 70
    try:
        os.chdir(scratch)
        os.dup2(out, 1)
        os.dup2(err, 2)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        os.environ["METADIST_CACHE"] = str(scratch / "cache")
        path = ROOT / case.script
        sys.argv = [str(path), *case.arguments]
        runpy.run_path(str(path), run_name="__main__")
        status = 0
    except SystemExit as exit_:
        status = 0 if exit_.code is None else exit_.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status if isinstance(status, int) else 1)


def _wait(child: int, deadline: float) -> int:
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        time.sleep(0.002)
