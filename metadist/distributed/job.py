"""A job: its live ranks, and which of them failed first.

A process may run several jobs in a row, and torchrun may restart processes, so each job begins
with a rendezvous.
"""

import os
import secrets
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from metadist.deadlines import call_within
from metadist.distributed.heartbeat import FIRST_FAILURE, REPORTED, Heartbeat
from metadist.distributed.rendezvous import all_gather_object, rendezvous
from metadist.distributed.store import (
    connect_store,
    elastic_store,
    heartbeat_counters,
    node_name,
    world_store,
)
from metadist.distributed.worker_local import WorkerLocal, delete_worker_local
from metadist.distributed.world import get_world_info, host_name, restart_count

T = TypeVar("T")

_NONCE = secrets.token_hex(8)

_REQUEST_SECONDS = 2.0


class Job:
    """The live ranks of one job.

    Attributes:
        store: the store under a prefix that only these ranks share.
        hosts: the machine of each rank.
        restarted: whether torchrun has restarted any of the ranks before.
        key: the job's unique name.
        owns_first_failure: whether this rank failed first.
        message_if_ended: the error to print if this rank is ended; see `extend_grace`.
    """

    def __init__(
        self,
        store: dist.Store,
        hosts: list[str],
        restarted: bool = False,
        key: str = "",
        heartbeat: Heartbeat | None = None,
    ) -> None:
        self.store = store
        self.hosts = hosts
        self.restarted = restarted
        self.key = key
        self.owns_first_failure = False
        self.message_if_ended = ""
        self._names = 0
        self._heartbeat = heartbeat
        self._stop_signal = 0
        self._reachable = True

    def end(self) -> None:
        """Leave the job. Any rank may call it at any time; it does not wait for other ranks."""
        heartbeat, self._heartbeat = self._heartbeat, None
        if heartbeat is not None:
            heartbeat.end()

    def worker_local(self, prefix: str, value: Any) -> WorkerLocal:
        """A handle to a value of this rank, which is deleted with the handle or at the next job.

        The n-th call gives all ranks the same name. Every rank calls it as often as the others.

        Args:
            prefix: the first part of the name.
            value: this rank's value.
        """
        self._names += 1
        local = WorkerLocal(f"{self.key}/{prefix}/{self._names}", value)
        weakref.finalize(local, delete_worker_local, local.name).atexit = False
        return local

    def claim_first_failure(self) -> bool:
        """Claim that this rank failed first. Any rank calls it after an error.

        Returns:
            Whether this rank must report its error, because no other rank has claimed the first
            failure or because the store does not answer.
        """
        rank = str(get_world_info().rank)
        first_rank = self._request(
            lambda: self.store.compare_set(FIRST_FAILURE, "", rank).decode(), rank
        )
        self.owns_first_failure = first_rank == rank
        return self.owns_first_failure

    def has_first_failure(self) -> bool:
        """Whether any rank has claimed the first failure."""
        return self._request(lambda: self.store.check([FIRST_FAILURE]), False)

    def mark_reported(self) -> None:
        """Record that the first failure has been printed."""
        self._request(lambda: self.store.set(REPORTED, "yes"), None)

    def is_reported(self) -> bool:
        """Whether the first failure has been printed."""
        return self._request(lambda: self.store.check([REPORTED]), False)

    def is_reachable(self) -> bool:
        """Whether the job's store answers, if slowly, and the heartbeat has not given it up."""
        if self._heartbeat is not None and self._heartbeat.store_lost:
            self._reachable = False
        self.is_reported()
        return self._reachable

    def _request(self, request: Callable[[], T], default: T) -> T:
        """The store's response, or `default` if it is slow or has failed."""
        if not self._reachable:
            return default
        response = call_within(_REQUEST_SECONDS, request)
        if not response.done():  # slow
            return default
        self._reachable = response.exception() is None
        return response.result() if self._reachable else default

    def extend_grace(self, message: str) -> None:
        """Give the other ranks more time to leave the job, after a failure has been reported.

        Args:
            message: the error to print if this rank is ended because another rank has not left the
                job; "" for none.
        """
        self.message_if_ended = message
        if self._heartbeat is not None:
            self._heartbeat.extend_grace()

    def silent_ranks(self) -> list[str]:
        """The watched ranks without a heartbeat for three seconds, with their machines."""
        ranks = [] if self._heartbeat is None else self._heartbeat.silent_ranks(3.0)
        return [f"rank {rank} on {self.hosts[rank]}" for rank in ranks]

    def mark_started(self, run: str) -> None:
        """Record, for processes after a restart, that a run has started. Rank zero calls it."""
        elastic_store().set(f"metadist/started/{run}", _process())

    def has_started(self, run: str) -> bool:
        """Whether an earlier process of rank zero, before a restart, has started the run."""
        key, store = f"metadist/started/{run}", elastic_store()
        return store.check([key]) and store.get(key).decode() != _process()

    def request_stop(self, number: int) -> None:
        """Pass a signal that this rank received on to rank zero. Safe in a signal handler."""
        self._stop_signal = number
        if self._heartbeat is not None:
            self._heartbeat.stop_signal = number

    @property
    def stop_signal(self) -> int:
        """The number of a signal that this rank or, on rank zero, any rank received; 0 for none."""
        if self._stop_signal:
            return self._stop_signal
        return self._heartbeat.received_stop_signal if self._heartbeat is not None else 0


_current = Job(dist.HashStore(), [host_name()])


def current_job() -> Job:
    """This process's job; before the first, a job with this process as its only rank."""
    return _current


def begin_job(
    timeout: float, on_lost: Callable[[str], None], rendezvous_timeout: float | None = None
) -> Job:
    """Start a job with the other ranks. Every rank calls it; it ends an earlier job.

    Args:
        timeout: seconds within which a rank that is lost later is detected.
        on_lost: the function called when a rank is lost; see `Heartbeat`.
        rendezvous_timeout: seconds to wait for all ranks to arrive. Default: `timeout`.

    Raises:
        RendezvousTimeoutError: some ranks did not arrive.
    """
    global _current
    _current.end()
    if _current.key:
        delete_worker_local(f"{_current.key}/")
    _current = Job(dist.HashStore(), [host_name()])  # for errors before the rendezvous
    wait = timeout if rendezvous_timeout is None else rendezvous_timeout
    rank_info = {
        "host": host_name(),
        "node": node_name(),
        "restarts": restart_count(),
        "key": secrets.token_hex(8),
    }
    ranks = all_gather_object(rendezvous("job", wait), "job", rank_info, timeout)
    hosts, key = [rank["host"] for rank in ranks], ranks[0]["key"]
    prefix = f"metadist/job/{key}"
    heartbeat = None
    if len(ranks) > 1:
        store = dist.PrefixStore(prefix, connect_store(wait))
        counters = heartbeat_counters(prefix, store)
        nodes = [rank["node"] for rank in ranks]
        leaders = [nodes.index(node) for node in nodes]
        heartbeat = Heartbeat(store, hosts, timeout, on_lost, counters=counters, leaders=leaders)
    restarted = any(rank["restarts"] > 0 for rank in ranks)
    store = dist.PrefixStore(prefix, world_store())
    _current = Job(store, hosts, restarted, key, heartbeat)
    if heartbeat is not None:
        heartbeat.start()
    return _current


def _process() -> str:
    """A name of this process that is unique across machines."""
    return f"{_NONCE}-{os.getpid()}"
