"""Two hosts: a run over both, the cable pulled out in the middle, and plugged in again."""

import time
from pathlib import Path
from typing import NamedTuple

from endings import SLACK_SECONDS
from namespaces import HOSTS, TwoHosts, why_not
from runs import Run, RunFailed, difference
from tables import tell


class Hosts(NamedTuple):
    """A run over two hosts."""

    strategy: str
    what: str
    seconds: str
    wrong: str
    """What was not as it should be; "" for nothing."""

    @property
    def good(self) -> bool:
        """Whether it went as it should."""
        return not self.wrong


def rows(folder: Path, timeout: float) -> list[Hosts]:
    """A whole run, one whose network is lost, and that one resumed; under rpc and allreduce."""
    if reason := why_not():
        print(f"skipped: two hosts: {reason}")
        return []
    found = []
    with TwoHosts() as hosts:
        for strategy in ("rpc", "allreduce"):
            whole, parts = folder / f"hosts-{strategy}", folder / f"hosts-cut-{strategy}"
            began = time.time()
            status, _ = _pair(hosts, whole, strategy, timeout, cut=False)
            wrong = "" if status == [0, 0] else f"exit status {status}"
            found.append(tell(Hosts(strategy, "completes", f"{time.time() - began:.1f}", wrong)))
            status, seconds = _pair(hosts, parts, strategy, timeout, cut=True)
            wrong = "too late" if max(seconds) > timeout + SLACK_SECONDS else ""
            wrong = wrong if all(status) else f"exit status {status}"
            words = ", ".join(f"host {i}: {each:.1f}" for i, each in enumerate(seconds))
            found.append(tell(Hosts(strategy, "network lost", words, wrong)))
            began = time.time()
            status, _ = _pair(hosts, parts, strategy, timeout, False, "resume=auto")
            wrong = difference(whole, parts) if status == [0, 0] else f"exit status {status}"
            found.append(tell(Hosts(strategy, "resumed", f"{time.time() - began:.1f}", wrong)))
    return found


def _pair(
    hosts: TwoHosts, directory: Path, strategy: str, timeout: float, cut: bool, *more: str
) -> tuple[list[int], list[float]]:
    """Run on both hosts; exit statuses, and seconds from the cut (or the start) to the ends."""
    options = [
        "--nnodes=2",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={HOSTS[0]}:29417",
        f"--rdzv-id={directory.name}-{time.time():.0f}",
        "--rdzv-conf=is_host=IS_HOST,read_timeout=5",
    ]
    hosts.link(up=True)
    began = time.time()
    runs = []
    for host, cable in enumerate(("md-a", "md-b")):
        torchrun = [option.replace("IS_HOST", str(host == 0).lower()) for option in options] + [
            f"--local-addr={HOSTS[host]}"
        ]
        runs.append(
            Run(
                directory,
                strategy,
                f"timeout_seconds={timeout:g}",
                *more,
                ranks=1,
                torchrun=torchrun,
                prefix=hosts.prefix(host),
                environment={"TP_SOCKET_IFNAME": cable, "GLOO_SOCKET_IFNAME": cable},
            )
        )
    try:
        if cut:
            runs[0].until(lambda: runs[0].iteration() >= 20)
            began = time.time()
            hosts.link(up=False)
        ended: dict[int, float] = {}
        while len(ended) < len(runs) and time.time() - began < timeout + 90:
            for host, run in enumerate(runs):
                if host not in ended and run.process.poll() is not None:
                    ended[host] = time.time() - began
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
