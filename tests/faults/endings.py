"""How a job ends after each fault: duration, exit status, error message, leaked resources."""

import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from faults.runs import Run, RunFailed, levels
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


class Fault(NamedTuple):
    """A component that fails.

    Attributes:
        options: overrides that select it; STRATEGY stands for "Rpc" or "AllReduce".
        error: a pattern of the error, which is printed once; "" if the process just ends.
        strategies: those in which it can happen.
    """

    options: tuple[str, ...]
    error: str = r"^(faults\.faulty\.)?FaultInjected: "
    strategies: tuple[str, ...] = ("rpc", "allreduce")


def _in_algorithm(where: str, rank: int, error: str = Fault._field_defaults["error"]) -> Fault:
    options = ("algorithm._target_=faults.faulty.FaultyMAML", f"+algorithm.where={where}")
    return Fault((*options, f"+algorithm.rank={rank}"), error)


_EXIT = r"^(SystemExit: 3|RuntimeError: sys\.exit\(3\) was called)"
_RAISES = {
    "raises at its start, rank 1": _in_algorithm("start", 1),
    "raises in a task, rank 1": _in_algorithm("task", 1),
    "raises in a task, rank 0": _in_algorithm("task", 0),
    "raises in the reducer": Fault(("reducer._target_=faults.faulty.FaultyReducer",)),
    "raises in the logger": Fault(("+logger.faulty._target_=faults.faulty.FaultyLogger",)),
    "raises in a task, close takes 10 s, rank 0": Fault(
        (
            *_in_algorithm("task", 0).options,
            "strategy._target_=faults.faulty.SlowToCloseSTRATEGY",
        )
    ),
    "returns what cannot be pickled, rank 1": Fault(
        ("+logger.faulty._target_=faults.faulty.UnpicklableResultLogger",),
        r"^error: worker1 .*its result cannot be transferred: .*injected fault",
        ("rpc",),
    ),
    "CPU tensor in a group for GPUs": Fault(
        ("strategy._target_=faults.faulty.GpuGroupAllReduce",),
        r"^RuntimeError: No backend type associated with device type cpu",
        ("allreduce",),
    ),
    "exits (sys.exit), rank 1": _in_algorithm("sys.exit", 1, _EXIT),
    "exits (sys.exit), rank 0": _in_algorithm("sys.exit", 0, _EXIT),
    "exits (os._exit), rank 1": _in_algorithm("os._exit", 1, ""),
}
_STRATEGIES = {"rpc": "Rpc", "allreduce": "AllReduce"}
_SIGNALS = {
    "SIGKILL, rank 1": (signal.SIGKILL, 1),
    "SIGKILL, rank 0": (signal.SIGKILL, 0),
    "SIGSTOP, rank 1": (signal.SIGSTOP, 1),
    "SIGSTOP, rank 0": (signal.SIGSTOP, 0),
}


_RANK_ZERO_ENDS_FIRST = "without torchrun, rank 0 ends first"


def rows(folder: Path, timeout: float, only: str = "", processes: int = 2) -> list[Ending]:
    """Every fault whose name contains `only`, under rpc and allreduce."""
    faults = [fault for fault in [*_RAISES, *_SIGNALS] if only in fault]
    cases = [
        (fault, strategy)
        for fault in faults
        for strategy in ("rpc", "allreduce")
        if fault not in _RAISES or strategy in _RAISES[fault].strategies
    ]
    # Frozen jobs are idle until their timeout, so they run concurrently.
    frozen = [case for case in cases if "SIGSTOP" in case[0]]
    found = [_end(folder, *case, timeout, processes) for case in cases if case not in frozen]
    with ThreadPoolExecutor(4 if processes == 2 else 1) as pool:
        found += pool.map(lambda case: _end(folder, *case, timeout, processes), frozen)
    if only in _RANK_ZERO_ENDS_FIRST:
        found += [_rank_zero_ends_first(folder, each) for each in ("rpc", "allreduce")]
    return found


def _rank_zero_ends_first(folder: Path, strategy: str) -> Ending:
    """A run without a fault, whose rank zero hosts the store and ends before the other rank."""
    target = f"strategy._target_=faults.faulty.EndsLate{_STRATEGIES[strategy]}"
    started = time.time()
    with Run(folder / f"by-hand-{strategy}", strategy, target, by_hand=True) as run:
        status = run.wait()
        seconds = time.time() - started
        leaked, output = run.leaked(), run.output()
    problems = [f"exit status {status}"] if status else []
    problems += ["an error"] if "error" in output else []
    problems += ["leaked resources"] if leaked else []
    allowed = 120.0
    return print_row(
        Ending(
            _RANK_ZERO_ENDS_FIRST,
            strategy,
            round(seconds, 1),
            allowed,
            status,
            output[-2000:] if problems else "",
            ", ".join(leaked),
            ", ".join(problems),
        )
    )


def _end(folder: Path, fault: str, strategy: str, timeout: float, processes: int) -> Ending:
    name = re.sub(r"\W+", "-", f"{fault}-{strategy}")
    time_file = folder / f"{name}.time"
    options = [f"timeout_seconds={timeout:g}", *levels(strategy, processes)]
    if fault in _RAISES:
        chosen = _RAISES[fault].options
        options += [each.replace("STRATEGY", _STRATEGIES[strategy]) for each in chosen]
    environment = {"METADIST_FAULT_TIME": str(time_file)}
    with Run(folder / name, strategy, *options, ranks=processes, environment=environment) as run:
        sent = 0.0
        if fault in _SIGNALS:
            number, rank = _SIGNALS[fault]
            run.wait_until(lambda: run.iteration() >= 10, 300.0)
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
    if fault in _RAISES:
        error = _RAISES[fault].error
    else:  # the worker that was lost is named, by another one
        error = rf"^error: rank \d+ on .*\brank {_SIGNALS[fault][1]} on "
    return print_row(check(fault, strategy, seconds, allowed, status, output, leaked, error))


def check(
    fault: str,
    strategy: str,
    seconds: float,
    allowed: float,
    status: int,
    output: str,
    leaked: list[str],
    error: str,
) -> Ending:
    """Check the end of a job against the expectations; `error` is a pattern, or ""."""
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
    found = len(re.findall(error, output, re.MULTILINE)) if error else 1
    if found != 1:
        problems.append(f"the error of the fault is printed {found} times")
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
