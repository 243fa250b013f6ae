"""Requests to the job's store grow in proportion to the number of ranks, which are threads here."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch.distributed as dist

from metadist.distributed import heartbeat, rendezvous
from metadist.distributed.heartbeat import Heartbeat
from metadist.distributed.rendezvous import all_gather_object, host_rendezvous, join_rendezvous
from metadist.distributed.store import FileCounters
from metadist.distributed.world import WorldInfo

SECONDS = 120.0


class CountingStore:
    """A client of a store that records its requests, each once: polls are repeated."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self.requests: set[tuple[str, str]] = set()

    def __getattr__(self, name: str):
        method = getattr(self._store, name)

        def recorded(*arguments):
            self.requests.add((name, repr(arguments)))
            return method(*arguments)

        return recorded


def count_requests(ranks: int, node_size: int, directory, monkeypatch) -> dict[str, list[int]]:
    """The requests of each rank, by operation; one beat of every rank is "heartbeat"."""
    shared, local = dist.HashStore(), threading.local()
    stores = [CountingStore(shared) for _ in range(ranks)]
    leaders = [rank - rank % node_size for rank in range(ranks)]
    beats: dict[int, Heartbeat] = {}
    for module in (heartbeat, rendezvous):
        monkeypatch.setattr(
            module, "get_world_info", lambda: WorldInfo(local.rank, ranks, local.rank, ranks)
        )

    def join(rank: int) -> None:
        if rank == 0:
            host_rendezvous(stores[rank], ranks, SECONDS)
        else:
            join_rendezvous(stores[rank], rank, SECONDS)

    def gather(rank: int) -> None:
        assert all_gather_object(stores[rank], "rank", rank, SECONDS) == [*range(ranks)]

    def start(rank: int) -> None:
        hosts = [f"host{leader}" for leader in leaders]
        node = FileCounters(directory / f"{ranks}-{leaders[rank]}")
        beats[rank] = Heartbeat(stores[rank], hosts, SECONDS, print, counters=node, leaders=leaders)

    def beat(rank: int) -> None:
        beats[rank].beat()

    operations = [("rendezvous", join), ("all_gather", gather), ("start", start)]
    found = {}
    with ThreadPoolExecutor(ranks) as pool:
        for operation, function in [*operations, ("first", beat), ("heartbeat", beat)]:

            def call(rank: int, function=function) -> None:
                local.rank = rank
                function(rank)

            for store in stores:
                store.requests.clear()
            list(pool.map(call, range(ranks)))
            found[operation] = [len(store.requests) for store in stores]
    return {name: found[name] for name in ("rendezvous", "all_gather", "heartbeat")}


def test_requests_are_linear_in_all_and_constant_for_each_rank(tmp_path, monkeypatch):
    small, large = (count_requests(ranks, 8, tmp_path, monkeypatch) for ranks in (16, 64))
    for operation, by_rank in large.items():
        assert max(by_rank) <= 6, operation
        assert sum(by_rank) <= 4.5 * sum(small[operation]), operation


def test_a_node_is_one_client_of_rank_zero(tmp_path, monkeypatch):
    by_rank = count_requests(8, 4, tmp_path, monkeypatch)["heartbeat"]
    assert by_rank[1:4] == by_rank[5:] == [1, 1, 1]  # first failures only
