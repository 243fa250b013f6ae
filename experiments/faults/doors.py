"""What the processes of a run listen on while it works, from the system's own tables."""

import contextlib
import ipaddress
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from namespaces import under_another_name, why_not
from runs import Run, RunFailed, listening, marked
from tables import tell


class Door(NamedTuple):
    """The listening sockets of a run."""

    strategy: str
    host_name: str
    workers: str
    """Of the workers: address (number of ports)."""
    agent: str
    """Of torchrun's agent."""

    @property
    def good(self) -> bool:
        """Whether the workers listen on loopback only."""
        doors = [each.split()[0] for each in self.workers.split(", ") if each]
        return all(ipaddress.ip_address(each).is_loopback for each in doors)


def rows(folder: Path) -> list[Door]:
    """Every strategy; where the host's name resolves to another address, too."""
    places: list[tuple[str, list[str]]] = [("as it is", [])]
    if why_not():
        print(f"skipped: the host's name resolving to another address: {why_not()}")
    else:
        places.append(("10.77.42.1", ["elsewhere"]))
    found = []
    for name, elsewhere in places:
        for strategy, more in (
            ("rpc", []),
            ("allreduce", []),
            ("allreduce", ["strategy.engine=ddp"]),
            ("local", []),
        ):
            directory = folder / f"doors-{strategy}{len(more)}-{len(elsewhere)}"
            prefix = under_another_name() if elsewhere else []
            with Run(directory, strategy, *more, prefix=prefix) as run:
                run.until(lambda run=run: run.iteration() >= 10)
                doors = _doors(run)
                if run.wait():
                    raise RunFailed(run.output())
            title = " ".join([strategy, *more])
            found.append(tell(Door(title, name, *doors)))
    return found


def _doors(run: Run) -> tuple[str, str]:
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
                # What a worker starts counts as the worker's.
                (workers if pid in ranks or _has_rank(pid) else agents).add(f"{address}:{port}")
    return _counted(workers), _counted(agents)


def _counted(doors: set[str]) -> str:
    """The addresses, each with how many of its ports are open."""
    addresses = Counter(door.rpartition(":")[0] for door in doors)
    return ", ".join(f"{address} ({number})" for address, number in sorted(addresses.items()))


def _has_rank(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"\0LOCAL_RANK=" in Path(f"/proc/{pid}/environ").read_bytes()
    return False
