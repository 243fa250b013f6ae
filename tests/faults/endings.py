"""How a job ends after each fault: duration, exit status, error message, leaked resources."""

import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from faults.runs import Run, RunFailed
from faults.tables import print_row

AGENT_GRACE_SECONDS = 30.0
"""How long torchrun's agent waits between SIGTERM and SIGKILL."""

SLACK_SECONDS = 10.0


class Ending(NamedTuple):
    """A fault and how the job ended."""

    fault: str
    strategy: str
    seconds: float
    allowed: float
    status: int
    error: str
    """The line with the first error."""
    leaked: str
    problems: str
    """Violated expectations; "" if none."""

    @property
    def passed(self) -> bool:
        """Whether every expectation holds."""
        return not self.problems


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
    """Every fault whose name contains `only`, under rpc and allreduce."""
    faults = [fault for fault in [*_RAISES, *_SIGNALS] if only in fault]
    cases = [(fault, strategy) for fault in faults for strategy in ("rpc", "allreduce")]
    # Frozen jobs are idle until their timeout, so they run concurrently.
    frozen = [case for case in cases if "SIGSTOP" in case[0]]
    found = [_end(folder, *case, timeout) for case in cases if case not in frozen]
    with ThreadPoolExecutor(4) as pool:
        found += pool.map(lambda case: _end(folder, *case, timeout), frozen)
    return found


def _end(folder: Path, fault: str, strategy: str, timeout: float) -> Ending:
    name = re.sub(r"\W+", "-", f"{fault}-{strategy}")
    time_file = folder / f"{name}.time"
    options = [f"timeout_seconds={timeout:g}"]
    if fault in _RAISES:
        group, target, *more = _RAISES[fault]
        options += [
            f"{group}._target_=faults.faulty.{target}",
            *(f"+{group}.{each}" for each in more),
        ]
    environment = {"METADIST_FAULT_TIME": str(time_file)}
    with Run(folder / name, strategy, *options, environment=environment) as run:
        sent = 0.0
        if fault in _SIGNALS:
            number, rank = _SIGNALS[fault]
            run.wait_until(lambda: run.iteration() >= 10)
            sent = run.signal_rank(rank, number)
        status = run.wait(timeout + AGENT_GRACE_SECONDS + 60)
        ended = time.time()
        leaked = run.leaked()
        output = run.output()
    if not sent and not time_file.exists():
        raise RunFailed(f"{fault}, {strategy}: the fault did not happen:\n{output}")
    seconds = ended - (sent or float(time_file.read_text()))
    frozen = "SIGSTOP" in fault
    allowed = timeout + SLACK_SECONDS + (AGENT_GRACE_SECONDS if frozen else 0.0)
    return print_row(
        check(fault, strategy, seconds, allowed, status, output, leaked, fault in _RAISES)
    )


def check(
    fault: str,
    strategy: str,
    seconds: float,
    allowed: float,
    status: int,
    output: str,
    leaked: list[str],
    raises: bool,
) -> Ending:
    """Check the end of a job against the expectations."""
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    problems = []
    if seconds > allowed:
        problems.append("too late")
    if status == 0:
        problems.append("exit status 0")
    if len(errors) != 1:
        problems.append(f"{len(errors)} errors")
    elif not re.search(r"rank \d+ on \S+", errors[0]):
        problems.append("rank and host not named")
    tracebacks = len(re.findall(r"^(faults\.faulty\.)?FaultInjected: ", output, re.MULTILINE))
    if raises and "exits" not in fault and tracebacks != 1:
        problems.append(f"{tracebacks} tracebacks")
    if leaked:
        problems.append("leaked resources")
    return Ending(
        fault,
        strategy,
        round(seconds, 1),
        allowed,
        status,
        errors[0].removeprefix("error: ") if errors else output[-2000:],
        ", ".join(leaked),
        ", ".join(problems),
    )
