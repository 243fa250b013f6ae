"""torchrun brings killed workers back, and goes on when a node has left."""

import os
import random
import signal
import socket
import time
from pathlib import Path
from typing import NamedTuple

from runs import Run, RunFailed, difference, marked
from tables import tell


class Restarts(NamedTuple):
    """A run whose workers were killed again and again, under one torchrun."""

    way: str
    strategy: str
    kills: int
    seconds: float
    difference: str
    """From the undisturbed run; "" when there is none."""

    @property
    def good(self) -> bool:
        """Whether it ended as if nothing had been."""
        return not self.difference


def rows(folder: Path, number: int, seed: int) -> list[Restarts]:
    """`number` restarts in a row in every strategy, then a node that leaves."""
    found = []
    for strategy in ("rpc", "allreduce", "local"):
        undisturbed = folder / f"undisturbed-{strategy}"
        with Run(undisturbed, strategy) as run:
            if run.wait():
                raise RunFailed(run.output())
        found.append(_again_and_again(folder, strategy, number, random.Random(seed), undisturbed))
        if strategy != "local":
            found.append(_a_node_leaves(folder, strategy, undisturbed))
    return found


def _again_and_again(
    folder: Path, strategy: str, number: int, chance: random.Random, undisturbed: Path
) -> Restarts:
    directory, began = folder / f"restarts-{strategy}", time.time()
    ranks = 1 if strategy == "local" else 2
    options = ["--standalone", f"--max-restarts={number}"]
    with Run(directory, strategy, ranks=ranks, torchrun=options) as run:
        for kill in range(number):
            goal = (kill + 1) * 90 // number
            run.until(lambda goal=goal: run.iteration() >= goal and len(run.workers()) == ranks)
            rank = chance.randrange(ranks)
            old = run.workers()[rank]
            run.signal_rank(rank, signal.SIGKILL)
            run.until(lambda rank=rank, old=old: run.workers().get(rank, old) != old)
        status = run.wait(180)
        words = run.output() if status else difference(undisturbed, directory)
    return tell(Restarts("killed again and again", strategy, number, _since(began), words))


def _a_node_leaves(folder: Path, strategy: str, undisturbed: Path) -> Restarts:
    directory, began = folder / f"node-leaves-{strategy}", time.time()
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
    # Both play a node on this machine: each process is to know its node's workers alone.
    nodes = {"TP_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    with Run(directory, strategy, ranks=1, torchrun=options, environment=nodes) as first:
        time.sleep(2)
        with Run(directory, strategy, ranks=1, torchrun=options, environment=nodes) as second:
            first.until(lambda: first.iteration() >= 40)
            if not second.workers():
                raise RunFailed(f"the second node took no part:\n{second.output()}")
            for pid, _ in marked(second.mark):
                os.kill(pid, signal.SIGKILL)
            status = first.wait(240)
            words = first.output() if status else difference(undisturbed, directory)
    if words == "results":  # the world has another size, and says so
        words = ""
    return tell(Restarts("of two nodes one leaves", strategy, 1, _since(began), words))


def _since(began: float) -> float:
    return round(time.time() - began, 1)
