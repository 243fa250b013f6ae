"""Requests to the job's store by the number of clients, which are threads here.

python experiments/benchmarks/store_operations.py --clients 16 64 256

All clients use one store in memory; the clients of a node share files for their heartbeats, as
under torchrun. How often a poll is repeated depends on the machine's speed, so the requests are
counted both with and without repetitions.
"""

import argparse
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from metadist.distributed.heartbeat import Heartbeat
from metadist.distributed.rendezvous import all_gather_object, host_rendezvous, join_rendezvous
from metadist.distributed.store import FileCounters
from metadist.distributed.world import WorldInfo

TIMEOUT_SECONDS = 120.0


class Requests(NamedTuple):
    """Requests of one operation.

    Attributes:
        operation: "rendezvous", "all_gather" or "heartbeat" (one beat of every client).
        by_client: the requests of each client, without repetitions.
        total: the requests of all clients, with repeated polls.
        seconds: the time until the last client finished.
    """

    operation: str
    by_client: list[int]
    total: int
    seconds: float


class CountingStore:
    """A client of a store that counts its requests."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self.requests: Counter[tuple] = Counter()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._store, name)

        def counted(*arguments: Any) -> Any:
            self.requests[name, repr(arguments)] += 1
            return method(*arguments)

        return counted


def count_requests(clients: int, node_size: int = 8) -> list[Requests]:
    """Count the requests of a rendezvous, of an all-gather and of a heartbeat.

    Args:
        clients: the number of clients.
        node_size: the number of clients on a node.
    """
    shared = dist.HashStore()
    stores = [CountingStore(shared) for _ in range(clients)]
    leaders = [rank - rank % node_size for rank in range(clients)]
    beats: dict[int, Heartbeat] = {}

    def join(rank: int) -> None:
        if rank == 0:
            host_rendezvous(stores[rank], clients, TIMEOUT_SECONDS)
        else:
            join_rendezvous(stores[rank], rank, TIMEOUT_SECONDS)

    def gather(rank: int) -> None:
        gathered = all_gather_object(stores[rank], "rank", rank, TIMEOUT_SECONDS)
        assert gathered == [*range(clients)]

    def start(rank: int) -> None:
        hosts = [f"host{leader}" for leader in leaders]
        node = FileCounters(directory / str(leaders[rank]))
        beats[rank] = Heartbeat(
            stores[rank], hosts, TIMEOUT_SECONDS, print, counters=node, leaders=leaders
        )

    def beat(rank: int) -> None:
        beats[rank].beat()

    results = []
    operations = (("rendezvous", join), ("all_gather", gather), ("", start), ("", beat))
    with tempfile.TemporaryDirectory() as folder, _rank_of_thread(clients) as run:
        directory = Path(folder)
        for operation, function in (*operations, ("heartbeat", beat)):
            for store in stores:
                store.requests.clear()
            started = time.perf_counter()
            run(function)
            seconds = time.perf_counter() - started
            by_client = [len(store.requests) for store in stores]
            total = sum(sum(store.requests.values()) for store in stores)
            results.append(Requests(operation, by_client, total, seconds))
    return [requests for requests in results if requests.operation]


@contextmanager
def _rank_of_thread(clients: int) -> Iterator[Callable[[Callable[[int], None]], None]]:
    """A function that calls another one in a thread for each rank."""
    local = threading.local()

    def world_info() -> WorldInfo:
        rank = getattr(local, "rank", 0)
        return WorldInfo(rank, clients, rank, clients)

    def call(function: Callable[[int], None], rank: int) -> None:
        local.rank = rank
        function(rank)

    def run(function: Callable[[int], None]) -> None:
        for future in [pool.submit(call, function, rank) for rank in range(clients)]:
            future.result()

    with ExitStack() as stack:
        for module in ("heartbeat", "rendezvous"):
            stack.enter_context(patch(f"metadist.distributed.{module}.get_world_info", world_info))
        pool = stack.enter_context(ThreadPoolExecutor(clients))
        yield run


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--node-size", type=int, default=8)
    options = parser.parse_args()
    columns = (
        "clients",
        "operation",
        "rank zero",
        "most of another",
        "all",
        "with polls",
        "seconds",
    )
    table = Table(*columns, title="requests to the store")
    for clients in options.clients:
        for operation, by_client, total, seconds in count_requests(clients, options.node_size):
            numbers = (by_client[0], max(by_client[1:], default=0), sum(by_client), total)
            table.add_row(str(clients), operation, *map(str, numbers), f"{seconds:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
