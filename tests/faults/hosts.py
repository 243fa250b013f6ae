"""A run over two hosts whose network is disconnected and restored."""

import time
from pathlib import Path
from typing import NamedTuple

from faults.endings import SLACK_SECONDS
from faults.namespaces import HOSTS, TwoHosts, unavailable_reason
from faults.runs import Run, RunFailed, difference, levels
from faults.tables import print_row


class Hosts(NamedTuple):
    """A run over two hosts."""

    strategy: str
    case: str
    seconds: str
    problem: str
    """The violated expectation; "" if none."""

    @property
    def passed(self) -> bool:
        """Whether the expectation holds."""
        return not self.problem


def rows(folder: Path, timeout: float, processes: int = 2) -> list[Hosts]:
    """An undisturbed run, one that loses its network, and its resumption; rpc and allreduce.

    Half of the processes are on each host.
    """
    if reason := unavailable_reason():
        print(f"skipped: two hosts: {reason}")
        return []
    found = []
    with TwoHosts() as hosts:
        for strategy in ("rpc", "allreduce"):
            undisturbed, cut = folder / f"hosts-{strategy}", folder / f"hosts-cut-{strategy}"
            started = time.time()
            status, _ = _pair(hosts, undisturbed, strategy, timeout, processes)
            problem = "" if status == [0, 0] else f"exit status {status}"
            found.append(
                print_row(Hosts(strategy, "completes", f"{time.time() - started:.1f}", problem))
            )
            status, seconds = _pair(hosts, cut, strategy, timeout, processes, cut=True)
            problem = "too late" if max(seconds) > timeout + SLACK_SECONDS else ""
            problem = problem if all(status) else f"exit status {status}"
            durations = ", ".join(f"host {i}: {each:.1f}" for i, each in enumerate(seconds))
            found.append(print_row(Hosts(strategy, "network lost", durations, problem)))
            started = time.time()
            status, _ = _pair(hosts, cut, strategy, timeout, processes, "resume=auto")
            problem = difference(undisturbed, cut) if status == [0, 0] else f"exit status {status}"
            found.append(
                print_row(Hosts(strategy, "resumed", f"{time.time() - started:.1f}", problem))
            )
    return found


def _pair(
    hosts: TwoHosts,
    directory: Path,
    strategy: str,
    timeout: float,
    processes: int,
    *more: str,
    cut: bool = False,
) -> tuple[list[int], list[float]]:
    """Run on both hosts.

    Returns:
        The exit statuses, and the seconds from the disconnection (or the start) to each end.
    """
    options = [
        "--nnodes=2",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={HOSTS[0]}:29417",
        f"--rdzv-id={directory.name}-{time.time():.0f}",
        "--rdzv-conf=is_host=IS_HOST,read_timeout=5",
    ]
    hosts.link(up=True)
    started = time.time()
    runs = []
    for host, interface in enumerate(("md-a", "md-b")):
        torchrun = [option.replace("IS_HOST", str(host == 0).lower()) for option in options] + [
            f"--local-addr={HOSTS[host]}"
        ]
        runs.append(
            Run(
                directory,
                strategy,
                f"timeout_seconds={timeout:g}",
                *levels(strategy, processes),
                *more,
                ranks=processes // 2,
                torchrun=torchrun,
                prefix=hosts.prefix(host),
                environment={"TP_SOCKET_IFNAME": interface, "GLOO_SOCKET_IFNAME": interface},
            )
        )
    try:
        if cut:
            runs[0].wait_until(lambda: runs[0].iteration() >= 20, 300.0)
            started = time.time()
            hosts.link(up=False)
        ended: dict[int, float] = {}
        while len(ended) < len(runs) and time.time() - started < timeout + 90 * (processes // 2):
            for host, run in enumerate(runs):
                if host not in ended and run.process.poll() is not None:
                    ended[host] = time.time() - started
            time.sleep(0.1)
        if len(ended) < len(runs):
            raise RunFailed("\n".join(run.output() for run in runs))
        for host, run in enumerate(runs):
            (directory.parent / f"{directory.name}-host{host}.log").write_text(run.output())
        return [run.process.returncode for run in runs], [ended[host] for host in range(2)]
    finally:
        for run in runs:
            run.end()
        hosts.link(up=True)
