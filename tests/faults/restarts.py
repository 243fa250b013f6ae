"""Worker restarts under torchrun, and a node that leaves an elastic job."""

import os
import random
import signal
import socket
import time
from pathlib import Path
from typing import NamedTuple

from faults.runs import Run, RunFailed, difference, marked
from faults.tables import print_row


class Restarts(NamedTuple):
    """A run whose workers were killed repeatedly under one torchrun."""

    case: str
    strategy: str
    kills: int
    seconds: float
    difference: str
    """From the undisturbed run; "" if none."""

    @property
    def passed(self) -> bool:
        """Whether the run equals the undisturbed one."""
        return not self.difference


def rows(folder: Path, number: int, seed: int) -> list[Restarts]:
    """`number` consecutive restarts in every strategy, then a node that leaves."""
    found = []
    for strategy in ("rpc", "allreduce", "local"):
        undisturbed = folder / f"undisturbed-{strategy}"
        with Run(undisturbed, strategy) as run:
            if run.wait():
                raise RunFailed(run.output())
        found.append(_killed_repeatedly(folder, strategy, number, random.Random(seed), undisturbed))
        if strategy != "local":
            found.append(_node_leaves(folder, strategy, undisturbed))
    return found


def _killed_repeatedly(
    folder: Path, strategy: str, number: int, rng: random.Random, undisturbed: Path
) -> Restarts:
    directory, started = folder / f"restarts-{strategy}", time.time()
    ranks = 1 if strategy == "local" else 2
    options = ["--standalone", f"--max-restarts={number}"]
    with Run(directory, strategy, ranks=ranks, torchrun=options) as run:
        for kill in range(number):
            goal = (kill + 1) * 90 // number
            run.wait_until(
                lambda goal=goal: run.iteration() >= goal and len(run.workers()) == ranks
            )
            rank = rng.randrange(ranks)
            old = run.workers()[rank]
            run.signal_rank(rank, signal.SIGKILL)
            run.wait_until(lambda rank=rank, old=old: run.workers().get(rank, old) != old)
        status = run.wait(180)
        differs = run.output() if status else difference(undisturbed, directory)
    return print_row(Restarts("killed repeatedly", strategy, number, _since(started), differs))


def _node_leaves(folder: Path, strategy: str, undisturbed: Path) -> Restarts:
    directory, started = folder / f"node-leaves-{strategy}", time.time()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    options = [
        "--nnodes=1:2",
        "--max-restarts=3",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{port}",
        f"--rdzv-id={directory.name}",
        "--local-addr=127.0.0.1",
        "--rdzv-conf=last_call_timeout=5",
    ]
    # Both nodes are on this machine, so the interface must be named.
    nodes = {"TP_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    with Run(directory, strategy, ranks=1, torchrun=options, environment=nodes) as first:
        time.sleep(2)
        with Run(directory, strategy, ranks=1, torchrun=options, environment=nodes) as second:
            first.wait_until(lambda: first.iteration() >= 40)
            if not second.workers():
                raise RunFailed(f"the second node did not join:\n{second.output()}")
            for pid, _ in marked(second.mark):
                os.kill(pid, signal.SIGKILL)
            status = first.wait(240)
            differs = first.output() if status else difference(undisturbed, directory)
    if differs == "results":  # world_size differs, as expected
        differs = ""
    return print_row(Restarts("one of two nodes leaves", strategy, 1, _since(started), differs))


def _since(started: float) -> float:
    return round(time.time() - started, 1)
