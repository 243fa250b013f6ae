"""A case and its answer: the command in a forked process, judged by what it leaves."""

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

EXPERIMENTS = Path(__file__).resolve().parent.parent
SECONDS = 60.0
"""After which a case counts as not answered."""

SMALL = (
    "++dataset.train_classes=12",
    "++dataset.validation_classes=6",
    "++dataset.test_classes=6",
    "++dataset.examples=6",
    "task.ways=3",
    "task.queries=2",
    "model.filters=4",
    "trainer.iterations=4",
    "trainer.meta_batch_size=5",
    "trainer.eval_every=2",
    "trainer.validation_tasks=3",
    "trainer.eval_tasks=7",
    "trainer.checkpoint_every=2",
    "logger=jsonl",
)
"""A run of a second, into which the wrong word goes."""


class Case(NamedTuple):
    """Something wrong, and the command that meets it.

    Attributes:
        kind: "configuration", "checkpoint", "archive", …
        name: what is wrong, in a few words.
        words: the command line after the script.
        about: the sentence has to name one of these, so that nothing is answered by accident.
        script: in `experiments/`.
        recovers: the program is to go on by itself, with exit status 0.
        prepare: makes the files of the case, just before.
        folder: theirs alone, removed afterwards.
    """

    kind: str
    name: str
    words: tuple[str, ...]
    about: tuple[str, ...] = ()
    script: str = "maml.py"
    recovers: bool = False
    prepare: Callable[[], object] | None = None
    folder: Path | None = None


class Answer(NamedTuple):
    """What a case came to.

    Attributes:
        case: the case.
        status: the exit status, minus the signal's number if one ended it.
        out: what went to the standard output.
        err: what went to the standard error.
        seconds: how long it took.
    """

    case: Case
    status: int
    out: str
    err: str
    seconds: float

    @property
    def proper(self) -> bool:
        """Whether it is what it should be."""
        if "Traceback" in self.out + self.err or "CODE WAS RUN" in self.out + self.err:
            return False
        if self.case.recovers:
            return self.status == 0 and not self.err
        sentence = self.err.strip()
        named = not self.case.about or any(word in sentence for word in self.case.about)
        one = sentence.startswith("error: ") and "\n" not in sentence
        return self.status == 2 and one and named


def answer(case: Case, scratch: Path) -> Answer:
    """Run a case in a forked process whose current directory is `scratch`.

    To be called in a process that runs no other threads.
    """
    if case.prepare is not None:
        case.prepare()
    try:
        return _answer(case, scratch)
    finally:
        if case.folder is not None:
            shutil.rmtree(case.folder)


def _answer(case: Case, scratch: Path) -> Answer:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        started = time.monotonic()
        child = os.fork()
        if child == 0:
            _run(case, scratch, out.fileno(), err.fileno())
        status = _wait(child, started + SECONDS)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return Answer(case, status, *texts, time.monotonic() - started)


def _run(case: Case, scratch: Path, out: int, err: int) -> None:
    """The child's life; it never returns."""
    status: object = 70
    try:
        os.chdir(scratch)
        os.dup2(out, 1)
        os.dup2(err, 2)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        os.environ["METADIST_CACHE"] = str(scratch / "cache")
        path = EXPERIMENTS / case.script
        sys.argv = [str(path), *case.words]
        runpy.run_path(str(path), run_name="__main__")
        status = 0
    except SystemExit as leaving:
        status = 0 if leaving.code is None else leaving.code
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
