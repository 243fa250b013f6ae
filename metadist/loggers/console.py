"""The console logger: a progress bar on a terminal, plain lines anywhere else."""

import contextlib
import os
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metadist.errors import UserError, printable
from metadist.files import discard_output, wrap_write_errors
from metadist.loggers.formatting import (
    format_duration,
    format_training,
    format_validation,
    is_validation,
    summarize_results,
)
from metadist.loggers.logger import Logger, Metrics, Run

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, Task

_PLAIN_LINES = 20  # one for every five percent
_BAR_WIDTH = 40
_NARROW_BAR_WIDTH = 10
_SPEED_SECONDS = 600.0  # the period from which the remaining time is estimated

_wrap_write_errors = partial(wrap_write_errors, "to the standard output", "redirect it elsewhere")


def print_plain(text: str) -> None:
    """Print to the standard output and flush it. Any rank may call it.

    Characters that the output's encoding does not have, and control characters, which a name in
    another person's run may contain, are replaced.

    Raises:
        UserError: the standard output cannot be written to; its `__cause__` is the `OSError`.
    """
    text = printable(text)
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = text.replace("±", "+/-").encode(encoding, "replace").decode(encoding)
    with _wrap_write_errors():
        print(text, flush=True)


class ConsoleLogger(Logger):
    """Shows the run on the standard output.

    On a terminal: the title, a progress bar with a line above it for every validation, and at the
    end the results and the contents of the run directory. Otherwise (a pipe, a file, `TERM=dumb`)
    the same in plain text without control characters, with one line for every five percent of the
    iterations and one line for every validation.

    Args:
        refresh_seconds: the minimum time between two refreshes of the progress bar, in seconds.
    """

    def __init__(self, refresh_seconds: float = 0.2) -> None:
        self._refresh_seconds = refresh_seconds
        self._refreshed = 0.0
        self._run: Run | None = None
        self._terminal: Console | None = None  # None: plain lines
        self._progress: Progress | None = None
        self._last_line = -1
        self._latest: Metrics = {}  # the newest value of each training metric

    def start(self, run: Run) -> None:
        """Prints the title and starts the progress bar."""
        self._run = run
        self._last_line = self._line_number(run.start_iteration) if run.resumed else -1
        if _is_terminal():
            from rich.console import Console

            self._terminal = Console(force_jupyter=False, highlight=False)
        self._print((run.title, "bold"))
        self._print((f"writes to {run.directory}", "dim"))
        if run.resumed:
            self._print((f"resumed at iteration {run.start_iteration}", "yellow"))
        self._progress = _make_progress(run, self._terminal)
        with _wrap_write_errors():
            self._progress.start()

    def log_metrics(self, metrics: Metrics) -> None:
        """Updates the progress bar, or prints a line."""
        assert self._progress is not None, "log_metrics() before start()"
        iteration = int(metrics["iteration"])
        if is_validation(metrics):
            assert self._run is not None
            description = self._run.split_descriptions.get("validation")
            text = format_validation(metrics) + (f" ({description})" if description else "")
            self._print((f"iteration {iteration}: ", "bold"), (text, "green"))
            return
        task = self._progress.tasks[0]
        if self._terminal is not None:
            self._latest = {**self._latest, **metrics}  # a callback logs its metrics alone
            parts = format_training(self._latest)
            free = self._terminal.width - _NARROW_BAR_WIDTH - 2 * len(str(task.total)) - 11
            while len(text := "  ".join(parts)) > free and len(parts) > 1:
                parts.pop()  # the least important ones are last
            self._progress.update(task.id, completed=iteration, metrics=text)
            now = time.monotonic()
            if now - self._refreshed >= self._refresh_seconds:
                self._refreshed = now
                with _wrap_write_errors():
                    self._progress.refresh()
            return
        self._progress.update(task.id, completed=iteration)
        if (number := self._line_number(iteration)) != self._last_line:
            self._last_line = number
            self._print((_plain_line(task, format_training(metrics)), ""))

    def log_message(self, text: str) -> bool:
        """Prints the message as a warning."""
        self._print((f"warning: {text}", "bold yellow"))
        return True

    def finish(self, results: Mapping[str, Any], plots: Sequence[Path]) -> None:
        """Prints the results and the contents of the run directory.

        If the reader of the standard output has ended, the run has not failed: its files have all
        of this.
        """
        try:
            self._print_results(results, plots)
        except UserError as error:
            if not isinstance(error.__cause__, BrokenPipeError):
                raise
            discard_output()

    def _print_results(self, results: Mapping[str, Any], plots: Sequence[Path]) -> None:
        assert self._run is not None, "finish() before start()"
        self._stop_progress()
        directory = self._run.directory
        contents = [
            (f"{name}/" if (directory / name).is_dir() else name, description)
            for name, description in self._run.contents.items()
            if (directory / name).exists()
        ]
        contents += [(os.path.relpath(plot, directory), "plot") for plot in plots]
        self._print(("", ""))
        tested = self._run.split_descriptions.get("test", "")
        self._print_rows(summarize_results(results, tested), first_style="bold green")
        self._print(("", ""))
        self._print((str(directory), "bold"))
        self._print_rows(contents)

    def close(self) -> None:
        """Restores the terminal; the progress bar stays as it was last refreshed."""
        with contextlib.suppress(Exception):
            self._stop_progress()

    def _line_number(self, iteration: int) -> int:
        assert self._run is not None
        return iteration * _PLAIN_LINES // max(self._run.iterations, 1)

    def _stop_progress(self) -> None:
        progress, self._progress = self._progress, None
        if progress is not None and self._terminal is not None:
            with _wrap_write_errors():
                progress.stop()

    def _print(self, *parts: tuple[str, str]) -> None:
        """Prints one line of (text, style); markup in a text is not interpreted."""
        parts = tuple((printable(text, kept=""), style) for text, style in parts)
        if self._terminal is None:
            print_plain("".join(text for text, _ in parts))
            return
        from rich.text import Text

        with _wrap_write_errors():
            # Soft wrap keeps a long path in one piece, so that it can be copied.
            self._terminal.print(Text.assemble(*parts), soft_wrap=True)

    def _print_rows(self, rows: Sequence[tuple[str, str]], first_style: str = "") -> None:
        """Prints rows of a label and a text."""
        width = max((len(label) for label, _ in rows), default=0)
        for index, (label, text) in enumerate(rows):
            self._print((f"  {label:<{width}}  ", "dim"), (text, "" if index else first_style))


def _make_progress(run: Run, terminal: "Console | None") -> "Progress":
    """The progress bar; without a terminal it is hidden and only measures time."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.table import Column

    # No refresh thread: a data loader that forks while the thread holds the console's lock would
    # leave its child processes waiting forever.
    fixed = Column(no_wrap=True)  # on a narrow terminal the bar shrinks first
    progress = Progress(
        BarColumn(_BAR_WIDTH),
        MofNCompleteColumn(table_column=fixed),
        TextColumn("{task.fields[metrics]}", style="cyan", markup=False),
        TimeRemainingColumn(elapsed_when_finished=True, table_column=fixed),
        console=terminal,
        auto_refresh=False,
        speed_estimate_period=_SPEED_SECONDS,
        disable=terminal is None,
    )
    progress.add_task("", total=run.iterations, completed=run.start_iteration, metrics="")
    return progress


def _plain_line(task: "Task", parts: list[str]) -> str:
    """Progress, metrics and time in one line."""
    total = int(task.total or 0)
    if task.finished:
        parts = [*parts, f"in {format_duration(task.elapsed or 0.0)}"]
    elif task.time_remaining is not None:
        parts = [*parts, f"{format_duration(task.time_remaining)} left"]
    text = ", ".join(" ".join(part.split()) for part in parts)
    iteration = int(task.completed)
    return f"iteration {iteration} of {total} ({100 * iteration // max(total, 1)}%): {text}"


def _is_terminal() -> bool:
    """Whether the standard output can show a progress bar."""
    stream = sys.stdout
    encoding = (getattr(stream, "encoding", None) or "").lower().replace("-", "")
    return stream.isatty() and os.environ.get("TERM") != "dumb" and encoding.startswith("utf")
