"""Cost of the framework itself; ratios are of two programs run alternately.

python experiments/benchmark.py overhead efficiency latency data startup iteration --rounds 5

efficiency  throughput of two workers relative to two concurrent one-worker runs of half the tasks
latency     `remote_sync_call` relative to `rpc.rpc_sync`
data        share of a step for data loading, and for everything except the tasks' computation
startup     time to the first iteration, relative to a script that imports torch and opens RPC
iteration   milliseconds of an iteration of sine waves whose tasks compute nothing, and the parts of
            a single step
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.programs import (
    BENCHMARKS,
    SETTINGS,
    TORCHRUN,
    WARM_UP,
    ProgramFailed,
    Setting,
    machine_title,
    metadist,
    result,
    start,
    tasks_per_second,
    training,
)
from benchmarks.programs import (
    run as run_program,
)
from benchmarks.results import console, save, table

from metadist.algorithms import MAML, TaskResult
from metadist.tasks import Episode

SETTING = Setting(8, 1, 15, 1, "max", 30)
STRATEGIES = ("rpc", "allreduce")
TIMEOUT_SECONDS = 300.0
COMPUTATION = ("forward", "backward")
"""The profile ranges in which tasks are computed; the other parts of a step are overhead."""

Row = tuple[str, str, float, str]
"""Quantity, reference or unit, value, and target."""


def efficiency(rounds: int, only: str) -> Iterator[Row]:
    """Two workers relative to two concurrent independent runs."""
    half = SETTING._replace(tasks=SETTING.tasks // 2)
    ratios_by_strategy: dict[str, list[float]] = {strategy: [] for strategy in STRATEGIES}
    for _ in range(rounds):
        independent = _concurrent_runs(half)
        for strategy, ratios in ratios_by_strategy.items():
            speed = metadist(f"strategy={strategy}")(SETTING, TIMEOUT_SECONDS)
            ratios.append(speed / independent)
    for strategy, ratios in ratios_by_strategy.items():
        reference = f"two concurrent one-worker runs, {SETTING}"
        yield f"2 workers, {strategy}", reference, statistics.median(ratios), "at least 0.97"


def _concurrent_runs(setting: Setting) -> float:
    """Tasks per second of two concurrent one-worker runs together."""
    with ExitStack() as stack:
        directories = [stack.enter_context(tempfile.TemporaryDirectory()) for _ in range(2)]
        commands = [training(setting, path, 1, "strategy=local") for path in directories]
        runs = [stack.enter_context(start(command)) for command in commands]
        for process in runs:
            result(process, TIMEOUT_SECONDS)
        return sum(tasks_per_second(Path(path), setting) for path in directories)


def latency(rounds: int, only: str) -> Iterator[Row]:
    """Latency of a remote call."""
    ratios = []
    for _ in range(rounds):
        command = [*TORCHRUN, "--nproc_per_node=2", str(BENCHMARKS / "latency.py")]
        ratios.append(json.loads(run_program(command, TIMEOUT_SECONDS).splitlines()[-1])["ratio"])
    yield "remote_sync_call", "rpc.rpc_sync, latency", statistics.median(ratios), "at most 1.2"


def data(rounds: int, only: str) -> Iterator[Row]:
    """Shares of rank zero's step, from its profile."""
    for strategy in STRATEGIES:
        shares: dict[str, list[tuple[float, float]]] = {}
        for _ in range(rounds):
            for setting in [setting for setting in SETTINGS if only in str(setting)]:
                ranges = profile(setting._replace(iterations=15), 2, f"strategy={strategy}")
                step = ranges["train_step"]
                framework = 1 - sum(ranges[name] for name in COMPUTATION) / step
                shares.setdefault(str(setting), []).append((ranges["data"] / step, framework))
        for setting, pairs in shares.items():
            loading, framework = map(statistics.median, zip(*pairs, strict=True))
            yield f"data loading, {strategy}", f"the whole step, {setting}", loading, "at most 0.02"
            yield f"all except the tasks, {strategy}", f"the whole step, {setting}", framework, ""


def profile(setting: Setting, processes: int, *options: str) -> dict[str, float]:
    """Run with overrides; returns milliseconds per step of each range on rank zero."""
    with tempfile.TemporaryDirectory() as directory:
        command = training(setting, directory, processes, *options, "trainer.profile=true")
        run_program(command, TIMEOUT_SECONDS)
        return profiled_ranges(Path(directory, "profile", "rank0.txt"))


def profiled_ranges(file: Path) -> dict[str, float]:
    """Milliseconds per step of each range, from a table that `trainer.profile=true` wrote."""
    rows = (line.split() for line in file.read_text(encoding="utf-8").splitlines()[2:])
    return {name: float(milliseconds) for name, milliseconds in rows}


def startup(rounds: int, only: str) -> Iterator[Row]:
    """Time to the first iteration."""
    setting = Setting(2, 1, 1, 1, "stride", 1 - WARM_UP)
    ratios_by_strategy: dict[str, list[float]] = {strategy: [] for strategy in STRATEGIES}
    minimal = [*TORCHRUN, "--nproc_per_node=2", str(BENCHMARKS / "minimal_rpc.py")]
    for _ in range(rounds):
        minimum = _seconds_until(minimal, lambda output: bool(output))
        for strategy, ratios in ratios_by_strategy.items():
            with tempfile.TemporaryDirectory() as directory:
                command = training(setting, directory, 2, f"strategy={strategy}")
                metrics = Path(directory, "metrics.jsonl")
                seconds = _seconds_until(
                    command,
                    lambda _, file=metrics: file.exists() and "train_loss" in file.read_text(),
                )
                ratios.append(seconds / minimum)
    for strategy, ratios in ratios_by_strategy.items():
        reference = "torchrun, import torch, open RPC"
        yield f"first iteration, {strategy}", reference, statistics.median(ratios), "at most 1.3"


def _seconds_until(command: list[str], ready: Callable[[str], bool]) -> float:
    """Seconds from the start of a command until `ready(its output)`; then waits for its end."""
    with tempfile.NamedTemporaryFile("w") as output:
        started = time.perf_counter()
        with start(command, output) as process:
            while True:
                ended = process.poll() is not None
                if ready(Path(output.name).read_text(encoding="utf-8")):
                    break
                if ended or time.perf_counter() - started > TIMEOUT_SECONDS:
                    raise ProgramFailed(
                        f"{' '.join(command)} ended or timed out before it was ready"
                    )
                time.sleep(0.005)
            seconds = time.perf_counter() - started
            result(process, TIMEOUT_SECONDS)
    return seconds


class NoComputation(MAML):
    """A learner whose loss is one of its parameters."""

    batches_tasks = True

    def train_task(self, episode: Episode) -> TaskResult:
        """Return a loss without adaptation and predictions."""
        return TaskResult(next(reversed(self.initial().values())).sum(-1), {})


def iteration(rounds: int, only: str) -> Iterator[Row]:
    """Milliseconds of an iteration without computation, and of a single step's parts.

    One process takes the steps in blocks, except in the run whose profile has the parts.
    """
    setting = Setting(25, 10, 10, 1, "mlp", 1000)
    target = f"algorithm._target_=benchmarks.overhead.{NoComputation.__name__}"
    for strategy, processes, compiled, most in (
        ("local", 1, "false", 0.5),
        ("local", 1, "true", 0.5),
        ("allreduce", 2, "false", 1.5),
    ):
        form = f"{strategy}, compiled" if compiled == "true" else strategy
        options = (f"strategy={strategy}", f"trainer.compile={compiled}", target)
        measure = metadist(*options, processes=processes)
        times = [1e3 * setting.tasks / measure(setting, TIMEOUT_SECONDS) for _ in range(rounds)]
        yield f"an iteration, {form}", "ms", statistics.median(times), f"at most {most}"
        for name, milliseconds in profile(setting, processes, *options).items():
            yield f"{name}, {form}", "ms, profiled", milliseconds, ""


PARTS: dict[str, Callable[[int, str], Iterator[Row]]] = {
    "efficiency": efficiency,
    "latency": latency,
    "data": data,
    "startup": startup,
    "iteration": iteration,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("parts", nargs="*", metavar="PART", help="default: all of them")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="data: settings whose name contains this")
    parser.add_argument("--out", type=Path, default=Path("outputs/overhead"))


def run(options: argparse.Namespace) -> None:
    """Run the chosen parts; print and save the table."""
    unknown = set(options.parts) - PARTS.keys()
    if unknown:
        raise SystemExit(
            f"error: unknown part {', '.join(sorted(unknown))}: choose from {', '.join(PARTS)}"
        )
    rows: list[Row] = []
    for part in options.parts or PARTS:
        try:
            part_rows = [*PARTS[part](options.rounds, options.only)]
        except ProgramFailed as error:
            console.print(f"{part}: no result: {error}")
            continue
        for row in part_rows:
            quantity, reference, value, target = row
            console.print(f"{quantity} / {reference}: {value:.3f} {target}")
            rows.append(row)
        _save(options, rows)
    _save(options, rows, show=True)


def _save(options: argparse.Namespace, rows: Sequence[Row], show: bool = False) -> None:
    cells = [(*names, f"{value:.3f}", target) for *names, value, target in rows]
    shown = table(machine_title(), ("quantity", "relative to", "median", "target"), cells)
    data = {"rounds": options.rounds, "rows": rows}
    save(options.out / "overhead", data, [shown], show)
