"""What the cost model says: tables, Markdown and a picture."""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.cost_model import Costs, Step
from benchmarks.programs import machine
from rich.table import Table

from metadist.plots.style import BLUE, GREEN, GREY, INK, ORANGE, new_figure, save_figure, style_axes

DISTRIBUTED = ("rpc", "allreduce")
_COLOURS = {"local": GREEN, "rpc": BLUE, "allreduce": ORANGE}
_EVEN = 0.02
"""Steps that differ by less than this share are called even."""

ASSUMPTIONS = (
    "every worker has a core, and the memory bandwidth that one process alone has here: workers "
    "on one machine share it, which is measured here and left out there",
    "every worker has as many tasks as the others, and none is slower than they are",
    "messages cost what they cost here over loopback, unless --latency and --bandwidth say else",
    "rpc: rank zero serves one worker after the other; allreduce: a ring",
)


class Extension(NamedTuple):
    """What is asked about more workers.

    Attributes:
        costs: there.
        workers: how many.
        tasks_a_worker: on each of them.
        parameters: sizes of models.
    """

    costs: Costs
    workers: Sequence[int]
    tasks_a_worker: int
    parameters: Sequence[int]

    def seconds(self, strategy: str, workers: int, parameters: int) -> float:
        """Of a step."""
        return self.costs.step(strategy, workers, workers * self.tasks_a_worker, parameters)

    def advice(self, workers: int, parameters: int) -> str:
        """Which strategy to use."""
        rpc, ring = (self.seconds(strategy, workers, parameters) for strategy in DISTRIBUTED)
        if abs(rpc - ring) < _EVEN * min(rpc, ring):
            return "either"
        return "rpc" if rpc < ring else "allreduce"

    def rows(self) -> list[list[str]]:
        """Parameters, from where rank zero is the bottleneck, and a cell a number of workers."""
        rows = []
        for parameters in self.parameters:
            limit = self.costs.rank_zero_limit(self.tasks_a_worker, parameters)
            row = [f"{parameters:,}", "never" if math.isinf(limit) else f"{math.ceil(limit):,}"]
            for workers in self.workers:
                alone = self.costs.step("local", 1, self.tasks_a_worker, parameters)
                shares = " / ".join(
                    f"{alone / self.seconds(strategy, workers, parameters):.0%}"
                    for strategy in DISTRIBUTED
                )
                row.append(f"{shares}: {self.advice(workers, parameters)}")
            rows.append(row)
        return rows

    def head(self) -> list[str]:
        """The columns of `rows`."""
        numbers = [f"{workers:,} workers" for workers in self.workers]
        return ["parameters", "rank zero is the bottleneck from", *numbers]

    def caption(self) -> str:
        """What a cell of `rows` says."""
        return (
            f"Efficiency of rpc / allreduce with {self.tasks_a_worker} tasks a worker (one worker "
            "alone is 100%), and which to use. Rank zero is rpc's bottleneck where its messages "
            "take longer than a worker's tasks."
        )


def tables(
    steps: Sequence[Step], costs: Costs, extension: Extension, cores: int
) -> list[Table | str]:
    """Measured steps beside the model's, the fitted costs, and the extension."""
    found = Table(title=f"ms a step, measured and by the model: {_machine()}")
    for name in ("strategy", "workers", "tasks", "parameters", "measured", "model", "off by"):
        found.add_column(name, justify="left" if name == "strategy" else "right")
    for strategy, workers, tasks, parameters, seconds in medians(steps):
        if strategy == "local" and not tasks:
            continue
        model = predicted(costs, Step(strategy, workers, tasks, parameters, seconds), cores)
        off = f"{model / seconds - 1:+.0%}"
        what = str(tasks) if tasks else "messages"
        figures = (f"{1000 * seconds:.2f}", f"{1000 * model:.2f}", off)
        found.add_row(strategy, str(workers), what, f"{parameters:,}", *figures)
    more = Table(*extension.head(), title=extension.caption())
    for row in extension.rows():
        more.add_row(*row)
    note = f"With more workers than the {cores} cores here, computation is taken to be stretched."
    return [found, note, *_words(costs), more, "Assumed:", *(f"- {a}" for a in ASSUMPTIONS)]


def _words(costs: Costs) -> list[str]:
    unknown = "too little to tell here"

    def rate(seconds: float, size: int) -> str:
        return f"{size / seconds / 1e9:.2f} GB/s" if seconds else unknown

    def time(seconds: float) -> str:
        return f"{1e6 * seconds:.0f} µs" if seconds else unknown

    return [
        f"compute: {1e3 * costs.compute[0]:.2f} ms a task, {1e6 * costs.compute[1]:.1f} µs more a "
        f"parameter's square root, {1e9 * costs.compute[2]:.1f} ns more a parameter; "
        f"{costs.sharing:.0%} more for each worker beside it on the machine",
        f"rpc: {time(costs.rpc[1])} and {rate(costs.rpc[2], 12)} a worker, "
        "12 bytes a parameter there and back",
        f"allreduce: {time(costs.allreduce[2])} a message and "
        f"{rate(costs.allreduce[3], 8)}, 8 bytes a parameter",
    ]


def markdown(extension: Extension) -> str:
    """The extension, for a README."""
    head = extension.head()
    rows = [head, ["---"] * len(head), *extension.rows()]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    assumed = "; ".join(ASSUMPTIONS)
    return (
        "\n".join([*lines, "", f"{extension.caption()} Assumed: {assumed}. {_machine()}."]) + "\n"
    )


def medians(steps: Sequence[Step]) -> list[Step]:
    """One step of each kind, with the median over rounds."""
    groups: dict[tuple, list[float]] = {}
    for *kind, seconds in steps:
        groups.setdefault(tuple(kind), []).append(seconds)
    return [Step(*kind, statistics.median(found)) for kind, found in groups.items()]


def predicted(costs: Costs, step: Step, cores: int) -> float:
    """What the model says of a measured step on this machine."""
    if not step.tasks:
        return costs.messages(step.strategy, step.workers, step.parameters)
    return costs.step(step.strategy, step.workers, step.tasks, step.parameters, cores)


def picture(
    steps: Sequence[Step], costs: Costs, extension: Extension, cores: int, path: Path
) -> None:
    """A panel a model's size: seconds a step against workers, tasks a worker held."""
    sizes = extension.parameters
    title = (
        f"A training step with {extension.tasks_a_worker} tasks on every worker, by a cost model "
        "fitted to measured steps"
    )
    figure = new_figure(4.2 * len(sizes), 4.4, title)
    most = max(extension.workers)
    grid = [2**power for power in range(math.ceil(math.log2(most)) + 1)]
    for axes, parameters in zip(
        figure.subplots(1, len(sizes), squeeze=False)[0], sizes, strict=True
    ):
        alone = costs.step("local", 1, extension.tasks_a_worker, parameters)
        axes.axhline(1000 * alone, color=GREY, linestyle=":", label="one worker alone")
        for strategy in DISTRIBUTED:
            seconds = [1000 * extension.seconds(strategy, workers, parameters) for workers in grid]
            axes.plot(grid, seconds, color=_COLOURS[strategy], label=strategy)
        limit = extension.costs.rank_zero_limit(extension.tasks_a_worker, parameters)
        if limit <= most:
            axes.axvline(limit, color=BLUE, linewidth=0.8, linestyle="--")
            text = f" from {math.ceil(limit)} workers on rank zero\n is the bottleneck of rpc"
            axes.text(limit, 0.97, text, transform=axes.get_xaxis_transform(), fontsize=8, va="top")
        for strategy in DISTRIBUTED:
            found = [
                s
                for s in medians(steps)
                if s.strategy == strategy
                and s.parameters == parameters
                and s.tasks == s.workers * extension.tasks_a_worker
                and s.workers <= cores
            ]
            dots = [1000 * s.seconds for s in found]
            axes.plot([s.workers for s in found], dots, "o", color=_COLOURS[strategy])
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(grid[::2], [f"{workers:,}" for workers in grid[::2]], fontsize=8)
        axes.set_xlabel("workers", color=INK)
        axes.set_title(f"{parameters:,} parameters", fontsize=10, color=INK)
        style_axes(axes, grid=None)
    first = figure.axes[0]
    first.set_ylabel("milliseconds a step", color=INK)
    first.legend(fontsize=8, frameon=False, loc="center left")
    figure.supxlabel(
        f"dots: measured here, a core a worker  ·  {_machine()}", fontsize=8, color=GREY
    )
    save_figure(figure, path)


def _machine() -> str:
    processor, *versions = machine().values()
    return f"{processor}, Python {versions[0]}, torch {versions[1]}"
