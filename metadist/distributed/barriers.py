"""Waiting for each other in an RPC world, with an eye on those that are waited for."""

import contextlib
import threading
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch.distributed import rpc

from metadist.distributed import workers
from metadist.distributed.lost import PeerLost
from metadist.distributed.workers import (
    HEARTBEAT_SECONDS,
    first_line,
    get_worker_id,
    place_of,
    require_answers,
)
from metadist.distributed.world import get_world_info


class Arrivals:
    """On a barrier's leader: who has come so far, and whom to tell when all have."""

    lock = threading.Lock()
    waiting: ClassVar[dict[str, dict[str, Any]]] = {}
    counts: ClassVar[dict[str, int]] = {}

    @classmethod
    def reset(cls) -> None:
        """Forget the world before."""
        with cls.lock:
            cls.waiting.clear()
            cls.counts.clear()

    @classmethod
    def next_key(cls, topic: str, names: list[str]) -> str:
        """The name of the next barrier of this topic and these workers."""
        group = ",".join([topic, *names])
        with cls.lock:
            cls.counts[group] = cls.counts.get(group, 0) + 1
            return f"{group}#{cls.counts[group]}"

    @classmethod
    def missing(cls, key: str, names: list[str]) -> list[str]:
        """Who has not come to a barrier yet."""
        with cls.lock:
            return [name for name in names if name not in cls.waiting.get(key, {})]


@rpc.functions.async_execution
def _arrive(key: str, name: str, names: list[str]) -> Any:
    future: Any = torch.futures.Future()
    with Arrivals.lock:
        came = Arrivals.waiting.setdefault(key, {})
        came[name] = future
        complete = Arrivals.waiting.pop(key) if len(came) == len(names) else {}
    for each in complete.values():
        each.set_result(None)
    return future


def barrier(worker_names: Iterable[str | int] | None = None, timeout: float | None = 60.0) -> None:
    """Wait until all workers, or those named, have come here too.

    Args:
        worker_names: names or numbers of the workers that meet; None for all. A worker that is
            not among them returns at once.
        timeout: seconds to wait for the others; None for as long as they answer heartbeats.

    Raises:
        PeerLost: a worker died, does not answer, or did not come in time; the message names it.
    """
    everyone = workers.worker_names()
    chosen = range(len(everyone)) if worker_names is None else map(get_worker_id, worker_names)
    wait_for("barrier", [everyone[rank] for rank in sorted(set(chosen))], timeout)


def wait_for(topic: str, names: list[str], timeout: float | None) -> None:
    """A barrier of `names`. Barriers of one topic meet in the order in which each worker calls
    them, so that one that failed on some workers leaves those of other topics in step.
    """
    me = workers.worker_names()[get_world_info().rank]
    if me not in names:
        return
    leader = names[0]
    key = Arrivals.next_key(topic, names)
    arrived = threading.Event()
    future = rpc.rpc_async(leader, _arrive, args=(key, me, names), timeout=timeout or 0)
    future.add_done_callback(lambda _: arrived.set())
    while not arrived.wait(HEARTBEAT_SECONDS):
        absent = Arrivals.missing(key, names) if me == leader else [leader]
        require_answers([name for name in absent if name != me])
    try:
        future.wait()
    except RuntimeError as error:
        absent = _absent(leader, key, names)
        if absent:
            who = f"{', '.join(map(place_of, absent))} did not come"
        else:
            who = f"{place_of(leader)} is gone or too late"
        raise PeerLost(f"{topic} of {', '.join(names)}: {who} ({first_line(error)}).") from None


def _absent(leader: str, key: str, names: list[str]) -> list[str]:
    """Who has not come to a barrier, as far as its leader can still be asked."""
    with contextlib.suppress(RuntimeError):
        return rpc.rpc_sync(leader, Arrivals.missing, args=(key, names), timeout=HEARTBEAT_SECONDS)
    return []
