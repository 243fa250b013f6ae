"""What is compared: metadist in its forms, and the rivals that are installed."""

import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from subprocess import Popen
from typing import IO, NamedTuple

HERE = Path(__file__).resolve().parent
EXPERIMENTS = HERE.parent
WARM_UP = 3


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


class Program(NamedTuple):
    """One of the compared.

    Attributes:
        name: as the table says it.
        measure: (setting, seconds until it is killed) -> tasks a second.
        needs: the package without which it is left out.
    """

    name: str
    measure: Callable[[Setting, float], float]
    needs: str = "torch"


class Failed(Exception):
    """A program that gave no result: it was killed after a while, or ended with an error."""


TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")


@contextlib.contextmanager
def started(command: list[str], printed: IO[str] | int = subprocess.PIPE) -> Iterator[Popen]:
    """A program whose processes have one thread each, unless it sets them; at the end of the
    context all of them are gone.
    """
    with Popen(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=printed,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                _end(process)


def result(process: Popen, patience: float) -> str:
    """What a started program printed, at its end.

    Raises:
        Failed: it took longer than `patience` seconds, or ended with an error.
    """
    try:
        printed, said = process.communicate(timeout=patience)
    except subprocess.TimeoutExpired:
        raise Failed(f"killed after {patience:.0f} s") from None
    if process.returncode:
        raise Failed(f"{' '.join(process.args)} failed:\n{said[-2000:]}")
    return printed


def run(command: list[str], patience: float) -> str:
    """Run a program to its end and return what it printed.

    Raises:
        Failed: it took longer than `patience` seconds, or ended with an error.
    """
    with started(command) as process:
        return result(process, patience)


def _end(process: Popen) -> None:
    """Torchrun ends its workers, which are sessions of their own, when it is asked to."""
    for number, seconds in ((signal.SIGTERM, 40.0), (signal.SIGKILL, None)):
        os.killpg(process.pid, number)
        try:
            process.communicate(timeout=seconds)
            return
        except subprocess.TimeoutExpired:
            continue


def rival(script: str, processes: int = 2) -> Callable[[Setting, float], float]:
    """A script beside this one, under torchrun or, in one process, alone."""

    def measure(setting: Setting, patience: float) -> float:
        start = (*TORCHRUN, f"--nproc_per_node={processes}") if processes > 1 else (sys.executable,)
        printed = run(
            [
                *start,
                str(HERE / script),
                f"--tasks={setting.tasks}",
                f"--shots={setting.shots}",
                f"--queries={setting.queries}",
                f"--inner-steps={setting.inner_steps}",
                f"--pooling={setting.pooling}",
                f"--iterations={setting.iterations}",
                f"--warm-up={WARM_UP}",
            ],
            patience,
        )
        return json.loads(printed.splitlines()[-1])["tasks_per_second"]

    return measure


def metadist(*options: str, processes: int = 2) -> Callable[[Setting, float], float]:
    """`experiments/maml.py` with options, by its own log."""

    def measure(setting: Setting, patience: float) -> float:
        with tempfile.TemporaryDirectory() as directory:
            run(training(setting, directory, processes, *options), patience)
            return speed(Path(directory), setting)

    return measure


def training(setting: Setting, directory: str, processes: int, *options: str) -> list[str]:
    """The command of a metadist run at a setting."""
    return [
        *(*TORCHRUN, f"--nproc_per_node={processes}", str(EXPERIMENTS / "maml.py")),
        "+partition=dim0",
        f"task.shots={setting.shots}",
        f"task.queries={setting.queries}",
        f"model.pooling={setting.pooling}",
        f"algorithm.inner_steps={setting.inner_steps}",
        f"trainer.meta_batch_size={setting.tasks}",
        f"trainer.iterations={setting.iterations + WARM_UP}",
        "trainer.eval_every=0",
        "trainer.eval_tasks=2",
        "trainer.checkpoint_every=0",
        "logger=jsonl",
        f"hydra.run.dir={directory}",
        *options,
    ]


def speed(directory: Path, setting: Setting) -> float:
    """Tasks a second behind the warm-up, whole steps, of a run that has ended."""
    lines = (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [record for record in map(json.loads, lines) if "train_loss" in record]
    seconds = records[-1]["seconds"] - records[WARM_UP - 1]["seconds"]
    return setting.tasks * (len(records) - WARM_UP) / seconds


RIVAL = "hand-written"
PROGRAMS = [
    Program(RIVAL, rival("hand_written.py")),
    Program("metadist, rpc", metadist("strategy=rpc")),
    Program("metadist, allreduce", metadist("strategy=allreduce")),
    Program(
        "metadist without C++, allreduce", metadist("strategy=allreduce", "model.native=false")
    ),
    Program("torchopt.distributed", rival("torchopt_distributed.py"), "torchopt"),
    Program("higher, 1 process of 2 threads", rival("higher_maml.py", processes=1), "higher"),
]


def installed(package: str) -> str | None:
    """A package's version, None if it is not there."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def machine() -> dict[str, str]:
    """What the figures were measured on, and with."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if sys.platform == "linux" else []:
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    packages = {name: installed(name) for name in ("torch", "torchopt", "higher")}
    return {
        "processor": f"{model}, {os.cpu_count()} cores",
        "Python": platform.python_version(),
        **{name: found for name, found in packages.items() if found},
    }
