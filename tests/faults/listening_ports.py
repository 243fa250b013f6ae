"""The listening sockets of a run's processes, read from /proc."""

import contextlib
import ipaddress
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from faults.namespaces import renamed_host, unavailable_reason
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
