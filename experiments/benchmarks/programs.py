"""The programs of the benchmarks: metadist and the baselines."""

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

from metadist.training.environment import cpu_name

BENCHMARKS = Path(__file__).resolve().parent
EXPERIMENTS = BENCHMARKS.parent
WARM_UP = 3


class Setting(NamedTuple):
    """A problem: few-shot tasks of glyphs with conv4, or of sine waves with an MLP; second order.

    Attributes:
        tasks: tasks per step.
        shots: support examples per class.
        queries: query examples per class.
        inner_steps: the number of inner steps.
        model: "stride" or "max" (conv4), or "mlp" (sine waves).
        iterations: the number of steps to time.
        ways: classes in a task.
        size: the height and width of the images.
        filters: the filters of conv4.
    """

    tasks: int
    shots: int
    queries: int
    inner_steps: int
    model: str
    iterations: int
    ways: int = 5
    size: int = 28
    filters: int = 64

    def __str__(self) -> str:
        ways = "" if self.ways == 5 else f"{self.ways}-way "
        size = "" if self.size == 28 else f"{self.size}×{self.size} "
        name = f"T{self.tasks} K{self.shots} Q{self.queries} S{self.inner_steps} {self.model}"
        return f"{ways}{size}{name}"


SETTINGS = [
    Setting(32, 1, 1, 1, "stride", 30),
    Setting(32, 1, 1, 1, "max", 15),
    Setting(8, 1, 15, 1, "max", 8),
    Setting(8, 1, 15, 5, "max", 5),
    Setting(16, 1, 1, 5, "stride", 4, ways=20),
    Setting(4, 1, 15, 5, "max", 3, size=84, filters=32),
    Setting(25, 10, 10, 1, "mlp", 200),
]


class Program(NamedTuple):
    """A program to compare.

    Attributes:
        name: the name in the tables.
        measure: a function (setting, timeout in seconds) -> tasks per second.
        requires: the package without which the program is skipped.
        models: the models of the settings that the program runs.
    """

    name: str
    measure: Callable[[Setting, float], float]
    requires: str = "torch"
    models: tuple[str, ...] = ("stride", "max", "mlp")


class ProgramFailed(Exception):
    """A program timed out or ended with an error."""


TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")


@contextlib.contextmanager
def start(command: list[str], stdout: IO[str] | int = subprocess.PIPE) -> Iterator[Popen]:
    """Start a program with one thread per process; terminate it at the end of the context."""
    with Popen(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                _terminate(process)


def result(process: Popen, timeout: float) -> str:
    """Wait for a started program and return its standard output.

    Raises:
        ProgramFailed: the program took longer than `timeout` seconds, or ended with an error.
    """
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        raise ProgramFailed(f"killed after {timeout:.0f} s") from None
    if process.returncode:
        # torchrun's lines follow the program's lines.
        lines = [line for line in errors.splitlines() if line.startswith("error: ")]
        reason = lines[0] if lines else errors[-2000:]
        raise ProgramFailed(f"{' '.join(process.args)} failed:\n{reason}")
    return output


def run(command: list[str], timeout: float) -> str:
    """Run a program to its end and return its standard output.

    Raises:
        ProgramFailed: the program took longer than `timeout` seconds, or ended with an error.
    """
    with start(command) as process:
        return result(process, timeout)


def _terminate(process: Popen) -> None:
    """Terminate a program. torchrun's workers have their own sessions: the agent must end them."""
    for number, seconds in ((signal.SIGTERM, 40.0), (signal.SIGKILL, None)):
        os.killpg(process.pid, number)
        try:
            process.communicate(timeout=seconds)
            return
        except subprocess.TimeoutExpired:
            continue


def baseline(script: str, processes: int = 2, **more: int) -> Callable[[Setting, float], float]:
    """A script in this folder, under torchrun if it has several processes; `more` are options."""

    def measure(setting: Setting, timeout: float) -> float:
        launch = (
            (*TORCHRUN, f"--nproc_per_node={processes}") if processes > 1 else (sys.executable,)
        )
        options = {**setting._asdict(), "warm-up": WARM_UP, **more}
        arguments = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        output = run([*launch, str(BENCHMARKS / script), *arguments], timeout)
        return json.loads(output.splitlines()[-1])["tasks_per_second"]

    return measure


def metadist(*options: str, processes: int = 2) -> Callable[[Setting, float], float]:
    """`experiments/maml.py` with overrides, measured by its `metrics.jsonl`."""

    def measure(setting: Setting, timeout: float) -> float:
        with tempfile.TemporaryDirectory() as directory:
            run(training(setting, directory, processes, *options), timeout)
            return tasks_per_second(Path(directory), setting)

    return measure


def training(setting: Setting, directory: str, processes: int, *options: str) -> list[str]:
    """The command of a metadist run."""
    problem = [
        f"task.ways={setting.ways}",
        f"model.pooling={setting.model}",
        f"model.filters={setting.filters}",
        f"+dataset.size={setting.size}",
    ]
    if setting.model == "mlp":
        problem = ["+experiment=maml_sinusoid"]
    return [
        *(*TORCHRUN, f"--nproc_per_node={processes}", str(EXPERIMENTS / "maml.py")),
        "+partition=dim0",
        *problem,
        f"task.shots={setting.shots}",
        f"task.queries={setting.queries}",
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


def tasks_per_second(directory: Path, setting: Setting) -> float:
    """Tasks per second of a finished run after the warm-up, over whole steps."""
    lines = (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [record for record in map(json.loads, lines) if "train_loss" in record]
    seconds = records[-1]["seconds"] - records[WARM_UP - 1]["seconds"]
    return setting.tasks * (len(records) - WARM_UP) / seconds


REFERENCE = "hand-written"
"""The program that the speeds of the others are relative to."""

PROGRAMS = [
    Program(REFERENCE, baseline("hand_written.py")),
    Program("metadist, rpc", metadist("strategy=rpc")),
    Program("metadist, allreduce", metadist("strategy=allreduce")),
    Program(
        "metadist without C++, allreduce", metadist("strategy=allreduce", "model.native=false")
    ),
    Program(
        "metadist, 1 process", metadist("strategy=local", "trainer.compile=false", processes=1)
    ),
    Program(
        "metadist compiled, 1 process",
        metadist("strategy=local", "trainer.compile=true", processes=1),
        models=("mlp",),
    ),
    Program("JAX (jit, vmap), 1 process", baseline("jax_maml.py", processes=1), "jax", ("mlp",)),
    Program(
        "JAX, 64 steps a call, 1 process",
        baseline("jax_maml.py", processes=1, steps_per_call=64),
        "jax",
        ("mlp",),
    ),
    Program("torchopt.distributed", baseline("torchopt_distributed.py"), "torchopt"),
    Program("higher, 1 process, 2 threads", baseline("higher_maml.py", processes=1), "higher"),
]


def installed(package: str) -> str | None:
    """The version of a package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def machine() -> dict[str, str]:
    """Processor and versions of the measurement."""
    packages = {name: installed(name) for name in ("torch", "torchopt", "higher", "jax")}
    return {
        "processor": f"{cpu_name()}, {os.cpu_count()} cores",
        "Python": platform.python_version(),
        **{name: release for name, release in packages.items() if release},
    }


def machine_title() -> str:
    """Processor and versions in one line, such as `…, 2 cores, Python 3.11.2, torch 2.9.0`."""
    processor, *versions = machine().items()
    return ", ".join([processor[1], *(f"{name} {release}" for name, release in versions)])
