"""Helpers of the Ray tests: small runs, and worker processes to signal."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from omegaconf import open_dict
from tiny import SMALL, compose

from metadist.launchers import RunSpec


def planned(directory: Path, *overrides: str) -> RunSpec:
    """A small experiment's run, as the driver has it."""
    directory.mkdir(parents=True, exist_ok=True)
    overrides = (*SMALL, *overrides)
    configuration = compose(*overrides)
    with open_dict(configuration):
        configuration.pop("launcher", None)
    return RunSpec(
        name="maml",
        directory=directory,
        configuration=configuration,
        overrides=overrides,
    )


def worker_processes(ancestor: int, actor: str = "RayTrainWorker") -> list[int]:
    """Processes of Ray actors of a class that are descendants of a process."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"ray::{actor}" in (entry / "cmdline").read_text():
                parent = int(entry.name)
                while parent > 1 and parent != ancestor:
                    stat = Path(f"/proc/{parent}/stat").read_text()
                    parent = int(stat.rpartition(")")[2].split()[1])
                if parent == ancestor:
                    found.append(int(entry.name))
        except OSError:
            continue
    return sorted(found)


def is_alive(process: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def signal_a_worker_once(
    ready: Callable[[], bool],
    actor: str = "RayTrainWorker",
    number: signal.Signals = signal.SIGKILL,
) -> list[int]:
    """Signal a worker of this process's Ray as soon as something is ready; in a thread.

    Returns:
        A list that then has the process.
    """
    signalled: list[int] = []

    def wait_and_signal() -> None:
        deadline = time.monotonic() + 120
        while not (ready() and worker_processes(os.getpid(), actor)):
            if time.monotonic() > deadline:
                return
            time.sleep(0.02)
        process = worker_processes(os.getpid(), actor)[-1]
        os.kill(process, number)
        signalled.append(process)

    threading.Thread(target=wait_and_signal, daemon=True).start()
    return signalled
