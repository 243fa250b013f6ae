"""What the framework itself costs, each part as a ratio of two programs run in turn.

python experiments/overhead.py twins latency data start --rounds 5

twins    two workers against two one-worker runs of half the tasks side by side: tasks a second
latency  `remote_sync_call` against a bare `rpc.rpc_sync`
data     the share of a step that loading takes, and all that is not a task's computation
start    from the command to the first finished iteration, against a bare torchrun script that
         imports torch and opens RPC
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

from benchmarks.programs import (
    HERE,
    SETTINGS,
    TORCHRUN,
    WARM_UP,
    Failed,
    Setting,
    machine,
    result,
    run,
    speed,
    started,
    training,
)
from rich.console import Console
from rich.table import Table

TWINS = Setting(8, 1, 15, 1, "max", 30)
STRATEGIES = ("rpc", "allreduce")
PATIENCE = 300.0
FRAMEWORK = ("data", "send", "reduce", "wait", "outer step", "log", "other")
"""Phases of a profile that are no task's computation."""

Row = tuple[str, str, float, str]
"""What was compared, with what, the figure, and the goal."""


def twins(rounds: int, only: str) -> Iterator[Row]:
    """Two workers against two independent runs."""
    half = TWINS._replace(tasks=TWINS.tasks // 2)
    found: dict[str, list[float]] = {strategy: [] for strategy in STRATEGIES}
    for _ in range(rounds):
        alone = _side_by_side(half)
        for strategy, ratios in found.items():
            with tempfile.TemporaryDirectory() as directory:
                run(training(TWINS, directory, 2, f"strategy={strategy}"), PATIENCE)
                ratios.append(speed(Path(directory), TWINS) / alone)
    for strategy, ratios in found.items():
        against = f"two one-worker runs side by side, {TWINS}"
        yield f"2 workers, {strategy}", against, statistics.median(ratios), "at least 0.97"


def _side_by_side(setting: Setting) -> float:
    """Two runs at once, together in tasks a second."""
    with ExitStack() as stack:
        places = [stack.enter_context(tempfile.TemporaryDirectory()) for _ in range(2)]
        commands = [training(setting, place, 1, "strategy=local") for place in places]
        runs = [stack.enter_context(started(command)) for command in commands]
        for process in runs:
            result(process, PATIENCE)
        return sum(speed(Path(place), setting) for place in places)


def latency(rounds: int, only: str) -> Iterator[Row]:
    """A call's own cost."""
    ratios = []
    for _ in range(rounds):
        command = [*TORCHRUN, "--nproc_per_node=2", str(HERE / "latency.py")]
        ratios.append(json.loads(run(command, PATIENCE).splitlines()[-1])["ratio"])
    yield "remote_sync_call", "rpc.rpc_sync, latency", statistics.median(ratios), "at most 1.2"


def data(rounds: int, only: str) -> Iterator[Row]:
    """Shares of a step of rank zero, from its profile."""
    for strategy in STRATEGIES:
        shares: dict[str, list[tuple[float, float]]] = {}
        for _ in range(rounds):
            for setting in (s for s in SETTINGS if only in str(s)):
                with tempfile.TemporaryDirectory() as directory:
                    options = (f"strategy={strategy}", "trainer.profile=true")
                    run(training(setting._replace(iterations=15), directory, 2, *options), PATIENCE)
                    report = Path(directory, "profile", "phases.json").read_text(encoding="utf-8")
                phases = json.loads(report)["seconds_a_step_by_rank"]["0"]
                own = sum(phases[name] for name in FRAMEWORK) / sum(phases.values())
                share = phases["data"] / sum(phases.values())
                shares.setdefault(str(setting), []).append((share, own))
        for setting, found in shares.items():
            loading, own = (statistics.median(each) for each in zip(*found, strict=True))
            yield f"loading, {strategy}", f"the whole step, {setting}", loading, "at most 0.02"
            yield f"all but the tasks, {strategy}", f"the whole step, {setting}", own, ""


def start(rounds: int, only: str) -> Iterator[Row]:
    """Seconds until something has been done."""
    setting = Setting(2, 1, 1, 1, "stride", 1 - WARM_UP)
    found: dict[str, list[float]] = {strategy: [] for strategy in STRATEGIES}
    bare = [*TORCHRUN, "--nproc_per_node=2", str(HERE / "bare_start.py")]
    for _ in range(rounds):
        least = _until(bare, lambda printed: bool(printed))
        for strategy, ratios in found.items():
            with tempfile.TemporaryDirectory() as directory:
                command = training(setting, directory, 2, f"strategy={strategy}")
                metrics = Path(directory, "metrics.jsonl")
                seconds = _until(
                    command, lambda _, m=metrics: m.exists() and "train_loss" in m.read_text()
                )
                ratios.append(seconds / least)
    for strategy, ratios in found.items():
        against = "torchrun, import torch, open RPC"
        yield f"first iteration, {strategy}", against, statistics.median(ratios), "at most 1.3"


def _until(command: list[str], there: Callable[[str], bool]) -> float:
    """Seconds from starting a command until what it printed or wrote is there; it then ends."""
    with tempfile.NamedTemporaryFile("w") as printed:
        began = time.perf_counter()
        with started(command, printed) as process:
            while True:
                ended = process.poll() is not None
                if there(Path(printed.name).read_text(encoding="utf-8")):
                    break
                if ended or time.perf_counter() - began > PATIENCE:
                    raise Failed(f"{' '.join(command)} came to nothing")
                time.sleep(0.005)
            seconds = time.perf_counter() - began
            result(process, PATIENCE)
    return seconds


PARTS: dict[str, Callable[[int, str], Iterator[Row]]] = {
    "twins": twins,
    "latency": latency,
    "data": data,
    "start": start,
}


def main() -> None:
    """Run the parts that are asked for; print and save the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; default all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="data: settings whose name holds this")
    parser.add_argument("--out", type=Path, default=Path("outputs/overhead"))
    asked = parser.parse_args()
    unknown = set(asked.parts) - PARTS.keys()
    if unknown:
        parser.error(f"there is no part {', '.join(sorted(unknown))}: take {', '.join(PARTS)}")
    console, rows = Console(highlight=False), []
    asked.out.mkdir(parents=True, exist_ok=True)
    for part in asked.parts or PARTS:
        try:
            found = [*PARTS[part](asked.rounds, asked.only)]
        except Failed as error:
            console.print(f"{part}: no result: {error}")
            continue
        for row in found:
            what, against, figure, goal = row
            console.print(f"{what} / {against}: {figure:.3f} {goal}")
            rows.append(row)
        report = {"machine": machine(), "rounds": asked.rounds, "rows": rows}
        (asked.out / "overhead.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    table = Table("what", "as a multiple of", "median ratio", "goal", title=str(machine()))
    for what, against, figure, goal in rows:
        table.add_row(what, against, f"{figure:.3f}", goal)
    with (asked.out / "overhead.txt").open("w", encoding="utf-8") as file:
        Console(file=file, width=140).print(table)
    console.print(f"saved: {asked.out}/overhead.txt, overhead.json")


if __name__ == "__main__":
    sys.exit(main())
