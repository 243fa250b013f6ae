"""Kill runs at random moments, resume them, and compare them with an undisturbed run."""

import os
import random
import signal
import time
from pathlib import Path
from typing import NamedTuple

from faults.runs import Run, RunFailed, difference
from faults.tables import print_row


class Kill(NamedTuple):
    """One SIGKILL and the outcome of the run."""

    number: int
    strategy: str
    rank: int
    moment: str
    seconds_until_end: float
    difference: str
    """From the undisturbed run, after resuming; "" if none."""

    @property
    def passed(self) -> bool:
        """Whether the resumed run equals the undisturbed one."""
        return not self.difference


_TIMEOUT = 600.0
"""Seconds that a resumed run may take; about ten on an idle machine."""


def rows(folder: Path, number: int, seed: int) -> list[Kill]:
    """Kill `number` runs, spread over strategies, ranks and moments."""
    rng = random.Random(seed)
    found = []
    undisturbed: dict[str, Path] = {}
    for index in range(number):
        strategy = ("rpc", "allreduce", "local")[index % 3]
        if strategy not in undisturbed:
            undisturbed[strategy] = folder / f"undisturbed-{strategy}"
            with Run(undisturbed[strategy], strategy) as run:
                if run.wait(_TIMEOUT):
                    raise RunFailed(run.output())
        writing = index % 4 == 3
        rank = 0 if writing or strategy == "local" else rng.randrange(2)
        directory = folder / f"kill-{index}"
        kill = _kill(directory, index, strategy, rank, writing, rng)
        with Run(directory, strategy, "resume=auto") as again:
            differs = _outcome(again, undisturbed[strategy])
        found.append(print_row(kill._replace(difference=differs)))
    return found


def _outcome(again: Run, undisturbed: Path) -> str:
    """What differs between a resumed run and the undisturbed one; "" if nothing."""
    try:
        status = again.wait(_TIMEOUT)
    except RunFailed as error:
        return str(error)
    if status:
        return f"exit status {status}: {again.output()}"
    return difference(undisturbed, again.directory)


def _kill(
    directory: Path, number: int, strategy: str, rank: int, writing: bool, rng: random.Random
) -> Kill:
    after = rng.randrange(0, 95)
    jitter = rng.uniform(0.0, 0.05)
    with Run(directory, strategy) as run:
        run.wait_until(lambda: run.workers().get(rank))
        run.wait_until(lambda: run.iteration() >= after)
        if writing:
            pid, parts = run.workers()[rank], directory / "checkpoints"
            run.wait_until(lambda: next(parts.glob(".*.part"), None), pause=0.0)
            os.kill(pid, signal.SIGKILL)
            sent = time.time()
        else:
            time.sleep(jitter)
            sent = run.signal_rank(rank, signal.SIGKILL)
        moment = f"iteration {run.iteration()}"
        if writing:
            cut = next(parts.glob(".*.part"), None)
            moment += f", writing a checkpoint{' (incomplete)' if cut else ''}"
        status = run.wait()
        seconds = time.time() - sent
        if status == 0:
            raise RunFailed(f"exit status 0 after a kill:\n{run.output()}")
    return Kill(number, strategy, rank, moment, round(seconds, 1), "")
