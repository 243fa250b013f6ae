"""Kill runs at random moments, resume them, and compare them with a run that nobody disturbed."""

import os
import random
import signal
import time
from pathlib import Path
from typing import NamedTuple

from runs import Run, RunFailed, difference
from tables import tell


class Kill(NamedTuple):
    """One SIGKILL and what became of the run."""

    number: int
    strategy: str
    rank: int
    moment: str
    seconds_until_end: float
    difference: str
    """From the undisturbed run, after resuming; "" when there is none."""

    @property
    def good(self) -> bool:
        """Whether the run ended as if it had not been killed."""
        return not self.difference


_PATIENCE = 600.0
"""Seconds that a resumed run may take: it ends in some ten, on a machine that has time for it."""


def rows(folder: Path, number: int, seed: int) -> list[Kill]:
    """Carry out `number` kills, spread over strategies, ranks and moments."""
    chance = random.Random(seed)
    found = []
    undisturbed: dict[str, Path] = {}
    for place in range(number):
        strategy = ("rpc", "allreduce", "local")[place % 3]
        if strategy not in undisturbed:
            undisturbed[strategy] = folder / f"undisturbed-{strategy}"
            with Run(undisturbed[strategy], strategy) as run:
                if run.wait(_PATIENCE):
                    raise RunFailed(run.output())
        writing = place % 4 == 3
        rank = 0 if writing or strategy == "local" else chance.randrange(2)
        directory = folder / f"kill-{place}"
        kill = _kill(directory, place, strategy, rank, writing, chance)
        with Run(directory, strategy, "resume=auto") as again:
            words = _outcome(again, undisturbed[strategy])
        found.append(tell(kill._replace(difference=words)))
    return found


def _outcome(again: Run, undisturbed: Path) -> str:
    """What a resumed run differs in from the undisturbed one; "" for nothing."""
    try:
        status = again.wait(_PATIENCE)
    except RunFailed as error:
        return str(error)
    if status:
        return f"exit status {status}: {again.output()}"
    return difference(undisturbed, again.directory)


def _kill(
    directory: Path, number: int, strategy: str, rank: int, writing: bool, chance: random.Random
) -> Kill:
    after = chance.randrange(0, 95)
    jitter = chance.uniform(0.0, 0.05)
    with Run(directory, strategy) as run:
        run.until(lambda: run.workers().get(rank))
        run.until(lambda: run.iteration() >= after)
        if writing:
            pid, parts = run.workers()[rank], directory / "checkpoints"
            run.until(lambda: next(parts.glob(".*.part"), None), pause=0.0)
            os.kill(pid, signal.SIGKILL)
            sent = time.time()
        else:
            time.sleep(jitter)
            sent = run.signal_rank(rank, signal.SIGKILL)
        moment = f"iteration {run.iteration()}"
        if writing:
            cut = next(parts.glob(".*.part"), None)
            moment += f", writing a checkpoint{' (cut short)' if cut else ''}"
        status = run.wait()
        seconds = time.time() - sent
        if status == 0:
            raise RunFailed(f"exit status 0 after a kill:\n{run.output()}")
    return Kill(number, strategy, rank, moment, round(seconds, 1), "")
