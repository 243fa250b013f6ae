"""Each fault, and how soon and how well the job ended after it."""

import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from runs import Run, RunFailed
from tables import tell

AGENT_GRACE_SECONDS = 30.0
"""How long torchrun's agent waits for a process that it has asked to end.."""

SLACK_SECONDS = 10.0


class Ending(NamedTuple):
    """A fault, and the end of the job that it hit."""

    fault: str
    strategy: str
    seconds: float
    allowed: float
    status: int
    cause: str
    """The line that names the first cause."""
    left_behind: str
    wrong: str
    """What was not as it should be; "" for nothing."""

    @property
    def good(self) -> bool:
        """Whether it ended as it should."""
        return not self.wrong


_RAISES = {
    "raises at its start, rank 1": ("algorithm", "FaultyMAML", "where=start"),
    "raises in a task, rank 1": ("algorithm", "FaultyMAML", "where=task"),
    "raises in a task, rank 0": ("algorithm", "FaultyMAML", "where=task", "rank=0"),
    "raises in the reducer": ("reducer", "FaultyReducer"),
    "raises in the logger": ("+logger.faulty", "FaultyLogger"),
    "exits (os._exit), rank 1": ("algorithm", "FaultyMAML", "where=exit"),
}
_SIGNALS = {
    "SIGKILL, rank 1": (signal.SIGKILL, 1),
    "SIGKILL, rank 0": (signal.SIGKILL, 0),
    "SIGSTOP, rank 1": (signal.SIGSTOP, 1),
    "SIGSTOP, rank 0": (signal.SIGSTOP, 0),
}


def rows(folder: Path, timeout: float, only: str = "") -> list[Ending]:
    """Every fault that has `only` in its name, under rpc and allreduce."""
    faults = [fault for fault in [*_RAISES, *_SIGNALS] if only in fault]
    cases = [(fault, strategy) for fault in faults for strategy in ("rpc", "allreduce")]
    # The frozen ones wait most of the time, and so they do it together.
    frozen = [case for case in cases if "SIGSTOP" in case[0]]
    found = [_end(folder, *case, timeout) for case in cases if case not in frozen]
    with ThreadPoolExecutor(4) as pool:
        found += pool.map(lambda case: _end(folder, *case, timeout), frozen)
    return found


def _end(folder: Path, fault: str, strategy: str, timeout: float) -> Ending:
    name = re.sub(r"\W+", "-", f"{fault}-{strategy}")
    noted = folder / f"{name}.time"
    options = [f"timeout_seconds={timeout:g}"]
    if fault in _RAISES:
        group, target, *more = _RAISES[fault]
        options += [f"{group}._target_=faulty.{target}", *(f"+{group}.{each}" for each in more)]
    environment = {"METADIST_FAULT_TIME": str(noted)}
    with Run(folder / name, strategy, *options, environment=environment) as run:
        sent = 0.0
        if fault in _SIGNALS:
            number, rank = _SIGNALS[fault]
            run.until(lambda: run.iteration() >= 10)
            sent = run.signal_rank(rank, number)
        status = run.wait(timeout + AGENT_GRACE_SECONDS + 60)
        ended = time.time()
        left = run.left_behind()
        output = run.output()
    if not sent and not noted.exists():
        raise RunFailed(f"{fault}, {strategy}: the fault did not happen:\n{output}")
    seconds = ended - (sent or float(noted.read_text()))
    frozen = "SIGSTOP" in fault
    allowed = timeout + SLACK_SECONDS + (AGENT_GRACE_SECONDS if frozen else 0.0)
    return tell(judge(fault, strategy, seconds, allowed, status, output, left, fault in _RAISES))


def judge(
    fault: str,
    strategy: str,
    seconds: float,
    allowed: float,
    status: int,
    output: str,
    left: list[str],
    raises: bool,
) -> Ending:
    """Look at everything that an end must be."""
    causes = [line for line in output.splitlines() if line.startswith("error: ")]
    wrong = []
    if seconds > allowed:
        wrong.append("too late")
    if status == 0:
        wrong.append("exit status 0")
    if len(causes) != 1:
        wrong.append(f"{len(causes)} causes")
    elif not re.search(r"rank \d+ on \S+", causes[0]):
        wrong.append("neither rank nor host")
    tracebacks = len(re.findall(r"^(faulty\.)?FaultInjected: ", output, re.MULTILINE))
    if raises and "exits" not in fault and tracebacks != 1:
        wrong.append(f"{tracebacks} tracebacks")
    if left:
        wrong.append("left behind")
    return Ending(
        fault,
        strategy,
        round(seconds, 1),
        allowed,
        status,
        causes[0].removeprefix("error: ") if causes else output[-2000:],
        ", ".join(left),
        ", ".join(wrong),
    )
