"""What a person sees of a run: a bar on a terminal, plain lines anywhere else."""

import contextlib
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from metadist.loggers.tracker import Record, Run, Tracker
from metadist.loggers.wording import is_validation, summary, validation_figures
from metadist.loggers.writing import writing

if TYPE_CHECKING:
    import rich.console
    import rich.live

    from metadist.loggers.progress import Progress

_STANDARD_OUTPUT = "to the standard output"
_PLAIN_LINES = 20  # one every five percent

_CONTENTS = (  # what a run's directory may hold, and what it is
    ("results.json", "these figures and the protocol"),
    ("metrics.jsonl", "a line for each iteration"),
    ("checkpoints", "to resume from, with resume=auto"),
    ("tensorboard", "tensorboard --logdir"),
    ("wandb", "wandb sync"),
    ("profile", "where a step's time goes; traces for ui.perfetto.dev"),
)


class Console(Tracker):
    """Shows the run on the standard output.

    On a terminal: a headline, a bar that stays at the bottom with a line above it for every
    validation, and at the end what was learned and where everything lies. Anywhere else (a pipe,
    a file, `TERM=dumb`) the same in plain text, without a control character: a line about every
    five percent of the iterations and one for every validation.

    Args:
        refresh_seconds: the bar is drawn no more often than this.
    """

    def __init__(self, refresh_seconds: float = 0.2) -> None:
        self._refresh_seconds = refresh_seconds
        self._run: Run | None = None
        self._progress: Progress | None = None
        self._terminal: rich.console.Console | None = None
        self._live: rich.live.Live | None = None
        self._drawn = 0.0
        self._said = -1

    def start(self, run: Run) -> None:
        """Prints the headline and draws the bar."""
        from metadist.loggers.progress import Progress

        self._run = run
        self._progress = Progress(run.iterations, run.start_iteration)
        self._said = self._step(run.start_iteration) if run.resumed else -1
        if _is_terminal():
            from rich.console import Console as Terminal

            self._terminal = Terminal(force_jupyter=False, highlight=False)
        self._say((run.headline, "bold"))
        self._say((f"writes to {run.directory}", "dim"))
        if run.resumed:
            self._say((f"resumed at iteration {run.start_iteration}", "yellow"))
        if self._terminal is not None:
            self._start_bar()

    def record(self, record: Record) -> None:
        """Moves the bar, or prints a line."""
        assert self._progress is not None, "record() before start()"
        if is_validation(record):
            self._say(
                (f"iteration {record['iteration']}: ", "bold"),
                (validation_figures(record), "green"),
            )
            return
        self._progress.update(record)
        if self._live is not None:
            now = time.monotonic()
            if now - self._drawn >= self._refresh_seconds:
                self._drawn = now
                with writing(_STANDARD_OUTPUT):
                    self._live.refresh()
        elif self._terminal is None and self._step(self._progress.iteration) != self._said:
            self._said = self._step(self._progress.iteration)
            self._say((self._progress.words(), ""))

    def note(self, sentence: str) -> bool:
        """Prints the sentence."""
        self._say((f"warning: {sentence}", "bold yellow"))
        return True

    def finish(self, results: Mapping[str, object], pictures: Sequence[Path]) -> None:
        """Prints what was learned and where everything lies."""
        self._stop_bar()
        learned = summary(results)
        contents = self._contents()
        contents += [(self._relative(picture), "picture") for picture in pictures]
        self._say(("", ""))
        self._say_rows(learned, first_style="bold green")
        self._say(("", ""))
        self._say((str(self._run.directory), "bold"))
        self._say_rows(contents)

    def close(self) -> None:
        """Lets go of the terminal: the bar stays as it was drawn last."""
        with contextlib.suppress(Exception):
            self._stop_bar()

    def _step(self, iteration: int) -> int:
        return iteration * _PLAIN_LINES // max(self._run.iterations, 1)

    def _start_bar(self) -> None:
        from rich.live import Live

        # No refreshing thread: a data loader that forks while it holds the console's lock would
        # leave its children waiting for ever.
        self._live = Live(self._progress, console=self._terminal, auto_refresh=False)
        with writing(_STANDARD_OUTPUT):
            self._live.start(refresh=True)

    def _stop_bar(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            with writing(_STANDARD_OUTPUT):
                live.stop()

    def _contents(self) -> list[tuple[str, str]]:
        directory = self._run.directory
        return [
            (f"{name}/" if (directory / name).is_dir() else name, what)
            for name, what in _CONTENTS
            if (directory / name).exists()
        ]

    def _relative(self, path: Path) -> str:
        with contextlib.suppress(ValueError):
            path = path.relative_to(self._run.directory)
        return str(path)

    def _say(self, *parts: tuple[str, str]) -> None:
        """Prints one line of (text, style); no part is read as markup."""
        parts = tuple((_printable(text), style) for text, style in parts)
        with writing(_STANDARD_OUTPUT):
            if self._terminal is None:
                _print_plainly("".join(text for text, _ in parts))
            else:
                from rich.text import Text

                # Soft wrap leaves a long path in one piece, so that it can be copied.
                self._terminal.print(Text.assemble(*parts), soft_wrap=True)

    def _say_rows(self, rows: Sequence[tuple[str, str]], first_style: str = "") -> None:
        """Prints rows of a label and a text."""
        width = max((len(label) for label, _ in rows), default=0)
        for place, (label, text) in enumerate(rows):
            self._say((f"  {label:<{width}}  ", "dim"), (text, "" if place else first_style))


def _is_terminal() -> bool:
    """Whether a bar can be drawn on the standard output."""
    stream = sys.stdout
    encoding = (getattr(stream, "encoding", None) or "").lower().replace("-", "")
    return stream.isatty() and os.environ.get("TERM") != "dumb" and encoding.startswith("utf")


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _print_plainly(text: str) -> None:
    """Prints and flushes, on a stream of any encoding."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = text.replace("±", "+/-").encode(encoding, "replace").decode(encoding)
    print(text, flush=True)
