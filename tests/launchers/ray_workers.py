"""Real Ray for the tests: runs planned in this process, and its workers' processes to kill."""

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
    """A shrunken experiment, as the starting process plans it."""
    directory.mkdir(parents=True, exist_ok=True)
    words = (*SMALL, *overrides)
    configuration = compose(*words)
    with open_dict(configuration):
        configuration.pop("launcher", None)
    return RunSpec(
        name="maml",
        directory=directory,
        configuration=configuration,
        overrides=words,
    )


def worker_processes(ancestor: int) -> list[int]:
    """The processes of Ray Train's workers below a process."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and b"ray::RayTrainWorker" in (entry / "cmdline").read_bytes():
                parent = int(entry.name)
                while parent > 1 and parent != ancestor:
                    stat = Path(f"/proc/{parent}/stat").read_text()
                    parent = int(stat.rpartition(")")[2].split()[1])
                if parent == ancestor:
                    found.append(int(entry.name))
        except OSError:
            continue
    return sorted(found)


def kill_a_worker_once(ready: Callable[[], bool]) -> list[int]:
    """Kill a worker of a Ray of this process as soon as something is ready; in a thread.

    Returns:
        A list that then has the killed process.
    """
    killed: list[int] = []

    def wait_and_kill() -> None:
        deadline = time.monotonic() + 120
        while not ready() and time.monotonic() < deadline:
            time.sleep(0.02)
        victim = worker_processes(os.getpid())[-1]
        os.kill(victim, signal.SIGKILL)
        killed.append(victim)

    threading.Thread(target=wait_and_kill, daemon=True).start()
    return killed
