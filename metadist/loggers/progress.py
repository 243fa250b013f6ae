"""One line that says how far a run is, made to fit the width of the terminal."""

import time
from collections import deque
from collections.abc import Mapping

from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from metadist.loggers.wording import duration, training_figures

_NARROWEST_BAR = 10
_WIDEST_BAR = 40


class Progress:
    """How far a run is; rich draws it as a bar with figures, and plain lines ask it for words.

    Args:
        iterations: training iterations in all.
        start_iteration: iterations that were finished before.
    """

    def __init__(self, iterations: int, start_iteration: int) -> None:
        self.iterations = iterations
        self.iteration = start_iteration
        self._figures: dict[str, str] = {}
        self._widths: dict[str, int] = {}
        self._began = time.monotonic()
        # A window, for the first iterations are slow; the pauses of validations count.
        self._seen = deque([(self._began, start_iteration)], maxlen=500)

    def update(self, record: Mapping[str, object]) -> None:
        """Takes one training record."""
        self.iteration = int(record["iteration"])
        self._figures = training_figures(record)
        self._seen.append((time.monotonic(), self.iteration))

    def time_words(self) -> str:
        """The time left, or at the end the time that it took."""
        now, last = self._seen[-1]
        if self.iteration >= self.iterations:
            return f"in {duration(now - self._began)}"
        then, first = self._seen[0]
        if last == first:
            return ""
        return f"{duration((now - then) / (last - first) * (self.iterations - last))} left"

    def words(self) -> str:
        """All of it in one plain line."""
        share = 100 * self.iteration // max(self.iterations, 1)
        figures = [*self._figures.values(), self.time_words()]
        told = ", ".join(" ".join(figure.split()) for figure in figures if figure)
        return f"iteration {self.iteration} of {self.iterations} ({share}%): {told}"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The bar, and of the figures as many as the width has room for."""
        count = f"{self.iteration:>{len(str(self.iterations))}}/{self.iterations}"
        figures = dict(self._figures)
        if words := self.time_words():
            figures["time"] = words
        for name, figure in figures.items():  # as wide as ever before, so that nothing jumps
            self._widths[name] = max(self._widths.get(name, 0), len(figure))
            wide = figure.ljust if name == "time" else figure.rjust
            figures[name] = wide(self._widths[name])
        room = options.max_width - _NARROWEST_BAR - len(count) - 2
        for least_needed in ("speed", "accuracy", "mse", "time", "loss"):
            if sum(len(figure) + 2 for figure in figures.values()) > room:
                figures.pop(least_needed, None)
        used = len(count) + 2 + sum(len(figure) + 2 for figure in figures.values())
        bar = ProgressBar(
            total=max(self.iterations, 1),
            completed=self.iteration,
            width=max(1, min(_WIDEST_BAR, options.max_width - used)),
        )
        line = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
        styles = {"loss": "cyan", "accuracy": "green", "mse": "green", "speed": "dim"}
        cells = [Text(text, style=styles.get(name, "")) for name, text in figures.items()]
        for _ in range(2 + len(cells)):
            line.add_column(no_wrap=True)
        line.add_row(bar, Text(count, style="bold"), *cells)
        yield line
