"""Real runs for fault injection: start, watch, signal and compare them, and find leaks.

Every process of a run has a marker variable in its environment, by which it is found.
"""

import contextlib
import ipaddress
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_MARK = "METADIST_FAULTS_RUN"

TINY = (
    "dataset=glyphs",
    "++dataset.train_classes=12",
    "++dataset.validation_classes=6",
    "++dataset.test_classes=6",
    "++dataset.examples=6",
    "task.ways=3",
    "task.queries=2",
    "model.filters=4",
    "trainer.iterations=100",
    "trainer.meta_batch_size=4",
    "trainer.eval_every=20",
    "trainer.validation_tasks=8",
    "trainer.eval_tasks=16",
    "trainer.checkpoint_every=4",
    "logger=jsonl",
)
"""Overrides with which training takes a few seconds."""


def levels(strategy: str, processes: int) -> list[str]:
    """Overrides with which many processes all have tasks, and call or sum in several levels.

    With 16 processes and rpc, rank 1 sends on the requests of ranks 2 to 8, and rank 9 those of
    ranks 10 to 15.
    """
    if processes == 2:
        return []
    options = {"rpc": ["fanout=2"], "allreduce": ["flat_up_to=4", "shared_memory=false"]}[strategy]
    return [
        *(f"strategy.{option}" for option in options),
        f"trainer.meta_batch_size={2 * processes}",
    ]


_TORCH_TEMPORARY = ("torchelastic_", "torchinductor_")
"""What torchrun's agent (an empty log folder) and torch (a cache) leave in TMPDIR."""


class RunFailed(Exception):
    """A run did not behave as expected."""


class Run:
    """A run of `experiments/maml.py` in subprocesses.

    Args:
        directory: the run's directory.
        strategy: rpc, allreduce or local.
        overrides: further overrides.
        ranks: number of processes under torchrun; `local` runs without torchrun.
        torchrun: options of torchrun; None for `--standalone`.
        by_hand: start the processes without torchrun.
        plain: start the script with python, whatever the strategy.
        prefix: prepended to the command, such as `ip netns exec NAME`.
        environment: further variables.
    """

    def __init__(
        self,
        directory: Path,
        strategy: str,
        *overrides: str,
        ranks: int = 2,
        torchrun: Sequence[str] | None = None,
        by_hand: bool = False,
        plain: bool = False,
        prefix: Sequence[str] = (),
        environment: dict[str, str] | None = None,
    ) -> None:
        self.directory = directory
        self.mark = uuid.uuid4().hex
        self._scratch = tempfile.TemporaryDirectory(prefix="metadist-faults-")
        self._before = _system_state()
        launch: list[str] = [sys.executable]
        if by_hand:
            launch += ["-m", "faults.by_hand", str(ranks)]
        elif not plain and (strategy != "local" or torchrun is not None):
            launch += ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}"]
            launch += ["--standalone"] if torchrun is None else list(torchrun)
        options = [*TINY, f"strategy={strategy}", f"hydra.run.dir={directory}", *overrides]
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [*prefix, *launch, str(ROOT / "experiments" / "maml.py"), *options],
            cwd=ROOT,
            env={
                **{name: value for name, value in os.environ.items() if name != "RANK"},
                "OMP_NUM_THREADS": "1",
                "TMPDIR": self._scratch.name,
                "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), str(ROOT)]),
                _MARK: self.mark,
                **(environment or {}),
            },
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def workers(self) -> dict[int, int]:
        """The process id of each live rank."""
        found = {}
        for pid, variables in marked(self.mark):
            rank = variables.get("RANK")
            if rank is not None and "LOCAL_RANK" in variables:
                found[int(rank)] = pid
        if not found and self.process.poll() is None and "RANK" not in os.environ:
            found[0] = self.process.pid
        return found

    def iteration(self) -> int:
        """The newest iteration in `metrics.jsonl`; 0 if there is none."""
        with contextlib.suppress(OSError, IndexError, ValueError, KeyError):
            lines = (self.directory / "metrics.jsonl").read_text().splitlines()
            return max(int(json.loads(line)["iteration"]) for line in lines[-2:])
        return 0

    def wait_until(
        self, ready: Callable[[], Any], seconds: float = 120.0, pause: float = 0.02
    ) -> Any:
        """Wait while the run is alive until `ready()` is true; returns its value."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if value := ready():
                return value
            if self.process.poll() is not None:
                raise RunFailed(f"the run ended early:\n{self.output()}")
            time.sleep(pause)
        raise RunFailed(f"the condition was not met within {seconds} s:\n{self.output()}")

    def signal_rank(self, rank: int, number: int) -> float:
        """Send a signal to a rank; returns the time at which it was sent."""
        pid = self.wait_until(lambda: self.workers().get(rank))
        sent = time.time()
        os.kill(pid, number)
        return sent

    def wait(self, seconds: float = 120.0) -> int:
        """Wait for the end; returns the exit status."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise RunFailed(f"the run did not end within {seconds} s:\n{self.output()}") from None

    def output(self) -> str:
        """The output of the run so far."""
        self._log.seek(0)
        return self._log.read()

    def leaked(self) -> list[str]:
        """Processes, listening sockets and temporary files that outlived the run."""
        found = [f"process {pid}" for pid, _ in marked(self.mark)]
        sockets, shared = _system_state()
        found += [f"socket {each}" for each in sorted(sockets - self._before[0])] if found else []
        found += [f"/dev/shm/{each}" for each in sorted(shared - self._before[1])]
        found += [
            f"file {path.name}"
            for path in Path(self._scratch.name).iterdir()
            if not path.name.startswith(_TORCH_TEMPORARY)
        ]
        found += [f"file {path.name}" for path in self.directory.rglob("*.part")]
        return found

    def end(self) -> None:
        """Kill the remaining processes of the run."""
        for pid, _ in marked(self.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        self._log.close()
        self._scratch.cleanup()

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def marked(mark: str) -> list[tuple[int, dict[str, str]]]:
    """The live processes of a marker, with their environments."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            content = (entry / "environ").read_bytes()
            if f"{_MARK}={mark}".encode() in content.split(b"\0"):
                pairs = (
                    item.decode(errors="replace").partition("=") for item in content.split(b"\0")
                )
                found.append((int(entry.name), {name: value for name, _, value in pairs}))
    return found


def _system_state() -> tuple[set[str], set[str]]:
    shared = Path("/dev/shm")
    return (
        {f"{address}:{port}" for address, port, _ in listening()},
        {path.name for path in shared.iterdir()} if shared.is_dir() else set(),
    )


def listening(pid: int | str = "self") -> list[tuple[str, int, int]]:
    """(address, port, inode) of every listening TCP socket in a process's network namespace."""
    rows = []
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
            rows += [line.split() for line in lines]
    found = []
    for row in rows:
        if row[3] != "0A":
            continue
        raw, port = row[1].split(":")
        groups = [bytes.fromhex(raw[i : i + 8])[::-1] for i in range(0, len(raw), 8)]
        address = ipaddress.ip_address(b"".join(groups))
        found.append((str(address), int(port, 16), int(row[9])))
    return found


_TIMES = (
    "seconds",
    "tasks_per_second",
    "samples_per_second",
    "train_seconds",
    "wall_seconds",
    "evaluation_seconds",
)


def difference(one: Path, other: Path) -> str:
    """What differs between two finished runs, durations excepted.

    Returns:
        "records", "parameters", "results", or "" if nothing differs.
    """
    from metadist.training.checkpoints import Checkpoints, read_checkpoint

    def records(path: Path) -> list[dict]:
        lines = (path / "metrics.jsonl").read_text().splitlines()
        return [_without_times(json.loads(line)) for line in lines]

    def last(path: Path) -> dict:
        _, newest = Checkpoints(path).iterations()[-1]
        contents = read_checkpoint(newest)
        del contents["configuration"]  # a resumed run has another `resume` and directory
        return _without_times(contents)

    if records(one) != records(other):
        return "records"
    if not _same(last(one), last(other)):
        return "parameters"
    results = [
        _without_times(json.loads((path / "results.json").read_text())) for path in (one, other)
    ]
    return "" if results[0] == results[1] else "results"


def _without_times(record: dict) -> dict:
    return {name: value for name, value in record.items() if name not in _TIMES}


def _same(one: Any, other: Any) -> bool:
    import torch

    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return one == other or (one != one and other != other)
