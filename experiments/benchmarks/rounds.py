"""metadist and its rivals on the same tasks, in turn, as ratios.

python experiments/benchmark.py --rounds 5

Each program runs in fresh processes of one thread, two of them, A B C A B C …, so that what else
the machine does meets all alike; a round's ratio compares neighbours in time, and the table has
the median over rounds. A step is a whole one: data, partition, gradient, reduce, outer step, and
for metadist the log.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import track
from rich.table import Table

HERE = Path(__file__).resolve().parent
EXPERIMENTS = HERE.parent
RIVAL = "hand-written"


class Setting(NamedTuple):
    """A problem: 5-way tasks of glyphs, conv4 with 64 filters, second order."""

    tasks: int
    shots: int
    queries: int
    inner_steps: int
    pooling: str
    iterations: int

    def __str__(self) -> str:
        return f"T{self.tasks} K{self.shots} Q{self.queries} S{self.inner_steps} {self.pooling}"


SETTINGS = [
    Setting(32, 1, 1, 1, "stride", 30),
    Setting(32, 1, 1, 1, "max", 15),
    Setting(8, 1, 15, 1, "max", 8),
    Setting(8, 1, 15, 5, "max", 5),
]


def torchrun(*command: str) -> str:
    """Run a program in two processes of one thread.

    Returns:
        What it printed.

    Raises:
        SystemExit: it failed; its last words are shown.
    """
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--standalone", "--nproc_per_node=2"),
            *command,
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return done.stdout


def hand_written(setting: Setting) -> float:
    """Tasks a second of the loop in bare PyTorch."""
    printed = torchrun(
        str(HERE / "hand_written.py"),
        f"--tasks={setting.tasks}",
        f"--shots={setting.shots}",
        f"--queries={setting.queries}",
        f"--inner-steps={setting.inner_steps}",
        f"--pooling={setting.pooling}",
        f"--iterations={setting.iterations}",
    )
    return json.loads(printed.splitlines()[-1])["tasks_per_second"]


def metadist(strategy: str) -> Callable[[Setting], float]:
    """Tasks a second of `experiments/maml.py` under a strategy, from its own log."""

    def run(setting: Setting) -> float:
        with tempfile.TemporaryDirectory() as directory:
            torchrun(
                str(EXPERIMENTS / "maml.py"),
                "+partition=dim0",
                f"strategy={strategy}",
                f"task.shots={setting.shots}",
                f"task.queries={setting.queries}",
                f"model.pooling={setting.pooling}",
                f"algorithm.inner_steps={setting.inner_steps}",
                f"trainer.meta_batch_size={setting.tasks}",
                f"trainer.iterations={setting.iterations + 3}",
                "trainer.eval_every=0",
                "trainer.eval_tasks=2",
                "trainer.checkpoint_every=0",
                "logger=jsonl",
                f"hydra.run.dir={directory}",
            )
            lines = (Path(directory) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        records = [record for record in map(json.loads, lines) if "train_loss" in record]
        seconds = records[-1]["seconds"] - records[2]["seconds"]
        return setting.tasks * setting.iterations / seconds

    return run


PROGRAMS: dict[str, Callable[[Setting], float]] = {
    RIVAL: hand_written,
    "metadist, rpc": metadist("rpc"),
    "metadist, allreduce": metadist("allreduce"),
}


def machine() -> str:
    """What the figures were measured on."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if sys.platform == "linux" else []:
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return (
        f"{model}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"torch {version('torch')}"
    )


def table_of(figures: dict[str, dict[str, list[float]]]) -> Table:
    """Medians over rounds: tasks a second, and the ratio to the rival in the same round."""
    table = Table(title=machine())
    table.add_column("tasks a second (times the rival)")
    for program in PROGRAMS:
        table.add_column(program, justify="right")
    for setting, found in figures.items():
        cells = []
        for speeds in found.values():
            pairs = zip(speeds, found[RIVAL], strict=True)
            ratio = statistics.median(speed / rival for speed, rival in pairs)
            cells.append(f"{statistics.median(speeds):.1f} ({ratio:.2f})")
        table.add_row(setting, *cells)
    return table


def main() -> None:
    """Run the rounds, print the table, save table and figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="settings whose name holds this")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmark"))
    asked = parser.parse_args()
    settings = [setting for setting in SETTINGS if asked.only in str(setting)]
    figures: dict[str, dict[str, list[float]]] = {
        str(setting): {program: [] for program in PROGRAMS} for setting in settings
    }
    for _ in track(range(asked.rounds), "rounds"):
        for setting in settings:
            for program, measure in PROGRAMS.items():
                figures[str(setting)][program].append(measure(setting))
    table = table_of(figures)
    asked.out.mkdir(parents=True, exist_ok=True)
    with (asked.out / "benchmark.txt").open("w", encoding="utf-8") as file:
        Console(file=file, width=110).print(table)
    report = {"machine": machine(), "tasks_per_second": figures}
    (asked.out / "benchmark.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    console = Console()
    console.print(table)
    console.print(f"saved: {asked.out}/benchmark.txt, benchmark.json")
