"""The listening sockets of a run's processes, and a scan of them from another host."""

import contextlib
import ipaddress
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from faults.namespaces import HOSTS, TwoHosts, renamed_host, unavailable_reason
from faults.runs import Run, RunFailed, listening, marked
from faults.tables import print_row


class ListeningPorts(NamedTuple):
    """The listening sockets of a run."""

    strategy: str
    host_name: str
    workers: str
    """Of the workers: address (number of ports)."""
    agent: str
    """Of torchrun's agent."""

    @property
    def passed(self) -> bool:
        """Whether the workers listen on loopback only."""
        addresses = [entry.split()[0] for entry in self.workers.split(", ") if entry]
        return all(ipaddress.ip_address(address).is_loopback for address in addresses)


def rows(folder: Path) -> list[ListeningPorts]:
    """Every strategy, with the host name as it is and resolving to a non-loopback address."""
    hosts: list[tuple[str, bool]] = [("as it is", False)]
    if reason := unavailable_reason():
        print(f"skipped: the host's name resolving to another address: {reason}")
    else:
        hosts.append(("10.77.42.1", True))
    found = []
    for host_name, renamed in hosts:
        for strategy, more in (
            ("rpc", []),
            ("allreduce", []),
            ("allreduce", ["strategy.engine=ddp"]),
            ("local", []),
        ):
            directory = folder / f"ports-{strategy}{len(more)}-{int(renamed)}"
            prefix = renamed_host() if renamed else []
            with Run(directory, strategy, *more, prefix=prefix) as run:
                run.wait_until(lambda run=run: run.iteration() >= 10)
                sockets = _sockets(run)
                if run.wait():
                    raise RunFailed(run.output())
            title = " ".join([strategy, *more])
            found.append(print_row(ListeningPorts(title, host_name, *sockets)))
    return found


def _sockets(run: Run) -> tuple[str, str]:
    """The sockets of the workers, and those of the agent."""
    workers, agents = set(), set()
    ranks = set(run.workers().values())
    for pid, _ in marked(run.mark):
        own = set()
        with contextlib.suppress(OSError):
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    own.add(str(descriptor.readlink()))
        for address, port, inode in listening(pid):
            if f"socket:[{inode}]" in own:
                # Children of a worker count as the worker.
                (workers if pid in ranks or _has_rank(pid) else agents).add(f"{address}:{port}")
    return _counted(workers), _counted(agents)


def _counted(sockets: set[str]) -> str:
    """The addresses, each with its number of ports."""
    addresses = Counter(socket.rpartition(":")[0] for socket in sockets)
    return ", ".join(f"{address} ({number})" for address, number in sorted(addresses.items()))


def _has_rank(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"\0LOCAL_RANK=" in Path(f"/proc/{pid}/environ").read_bytes()
    return False


class Scan(NamedTuple):
    """A scan of a run's host, a network namespace, from another one."""

    run: str
    listening: str
    """Every listening port of the host: address:port."""
    reachable: str
    """Those that the other host can connect to."""
    addresses_in_reach: str
    """Keys of metadist's rendezvous in a reachable store."""

    @property
    def passed(self) -> bool:
        """Whether nothing that decides where RPC connects can be reached."""
        return not self.addresses_in_reach and self.reachable.count(":") <= _AGENT_PORTS[self.run]


_AGENT_PORTS = {
    "torchrun, rpc": 2,
    "torchrun, allreduce": 2,
    "launcher=torchrun, rpc": 0,
    "launcher=torchrun, allreduce": 0,
    "without torchrun, rpc": 0,
    "without torchrun, allreduce": 0,
}
"""How many ports torch's agent opens to other hosts, by the way to start a run."""

_SCAN = """
import json, socket, sys
from datetime import timedelta
import torch.distributed as dist
host, ports = sys.argv[1], json.loads(sys.argv[2])
reachable, keys = [], []
for port in ports:
    try:
        socket.create_connection((host, port), timeout=2).close()
    except OSError:
        continue
    reachable.append(port)
    try:
        store = dist.TCPStore(host, port, wait_for_workers=False, timeout=timedelta(seconds=3))
        topics = ("job", "rpc", "process_group")
        keys += [t for t in topics if store.check([f"metadist/{t}/session"])]
    except RuntimeError:
        pass
print(json.dumps([reachable, keys]))
"""


def scans(folder: Path) -> list[Scan]:
    """Runs on one node, started in three ways, each scanned from another host."""
    if reason := unavailable_reason():
        print(f"skipped: a scan from another host: {reason}")
        return []
    found = []
    with TwoHosts() as hosts:
        for title in _AGENT_PORTS:
            start, strategy = title.split(", ")
            with _start(folder, hosts, start, strategy) as run:
                run.wait_until(lambda run=run: run.iteration() >= 10)
                sockets = {(address, port) for address, port, _ in listening(run.process.pid)}
                ports = json.dumps(sorted({port for _, port in sockets}))
                scan = subprocess.run(
                    [*hosts.prefix(1), sys.executable, "-c", _SCAN, HOSTS[0], ports],
                    capture_output=True,
                    text=True,
                    timeout=120,
                )
                if scan.returncode:
                    raise RunFailed(scan.stderr)
            reachable, keys = json.loads(scan.stdout.splitlines()[-1])
            listed = ", ".join(f"{address}:{port}" for address, port in sorted(sockets))
            reached = ", ".join(f"{HOSTS[0]}:{port}" for port in reachable)
            found.append(print_row(Scan(title, listed, reached, ", ".join(keys))))
    return found


def _start(folder: Path, hosts: TwoHosts, start: str, strategy: str) -> Run:
    """A run of two workers on the first host, which goes on until it is ended."""
    directory = folder / f"scan-{start.replace(' ', '-').replace('=', '-')}-{strategy}"
    options = ["trainer.iterations=100000", "trainer.eval_every=0", "trainer.checkpoint_every=0"]
    if start == "torchrun":
        return Run(directory, strategy, *options, prefix=hosts.prefix(0))
    if start == "launcher=torchrun":
        return Run(directory, strategy, *options, start, plain=True, prefix=hosts.prefix(0))
    return Run(directory, strategy, *options, by_hand=True, prefix=hosts.prefix(0))
