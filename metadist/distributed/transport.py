"""Transports of worker calls: their interface, the open transport, and the barrier of its workers.

torch.distributed.rpc is one implementation (`metadist.distributed.rpc`).
"""

import hashlib
import json
import logging
import math
import numbers
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from metadist.deadlines import wait_until
from metadist.distributed.errors import WorkerLostError
from metadist.distributed.job import current_job
from metadist.distributed.rendezvous import missing_keys, wait_for_keys
from metadist.distributed.request_threads import CALL_STILL_RUNS, REQUEST_SECONDS, request_threads
from metadist.distributed.store import store_errors_as_worker_lost
from metadist.distributed.world import (
    WorkerNameFormat,
    default_worker_name_format,
    get_world_info,
    set_worker_name_format,
)
from metadist.errors import UserError, first_line

_log = logging.getLogger(__name__)

PING_INTERVAL = 1.0
"""Seconds between two pings of a worker that this one waits for."""

PING_TIMEOUT = 30.0
"""The default number of seconds after which a worker that does not answer a ping is lost."""

MAX_TIMEOUT = 2_000_000
"""The longest time limit of a request, in seconds: TensorPipe counts milliseconds in 32 bits."""


class Request(Protocol):
    """A request that a transport sends to a worker."""

    @property
    def anchor(self) -> Tensor | None:
        """The request's anchor in the caller's autograd context; None outside a context."""

    @property
    def keep_device(self) -> bool:
        """Whether the response may have tensors on other devices than the CPU."""

    def respond(self) -> Any:
        """The response, or a `RemoteFailure`; it never raises an exception."""


class Transport(Protocol):
    """Sends requests to workers and receives their responses.

    Attributes:
        names: the workers' names in the order of their ranks, set by `open`.
        store: the store under a prefix that only these workers share, set by `open`.
        ping_timeout: seconds after which a worker that does not answer a ping is lost.
        timeout: the default number of seconds that a request may take; 0 for no limit.
        carries_devices: whether GPU tensors arrive on a GPU; if not, they are moved to the CPU.
        records_autograd: whether distributed autograd contexts record the transferred tensors.
    """

    names: list[str]
    store: dist.Store
    ping_timeout: float
    timeout: float
    carries_devices: bool
    records_autograd: bool

    def open(self) -> None:
        """Connect to the other workers. Every rank calls it."""

    def close(self, graceful: bool) -> None:
        """Disconnect. If `graceful`, every rank calls it; otherwise leave at once."""

    def send(self, worker: str, request: Request, timeout: float | None) -> Future:
        """Send a request. Any rank and any thread may call it.

        Args:
            worker: the worker's name.
            request: the request, whose `respond` the worker calls.
            timeout: seconds until the future fails; None for the transport's default, 0 for no
                limit. A transport may ignore it for requests to this process, whose caller
                (`metadist.distributed.requests`) stops waiting.

        Returns:
            A future of the result of `Request.respond`, for a copy of the request.

        Raises:
            pickle.PicklingError: the request cannot be pickled.
        """

    def ping(self, worker: str) -> Future:
        """A future that completes when the worker answers and fails after `ping_timeout`."""

    def is_timeout(self, error: Exception) -> bool:
        """Whether this error of a future of `send` means that its timeout has expired."""


_transport: Transport | None = None
_barriers: Counter[str] = Counter()


def open_transport(
    transport: Transport, worker_name_format: WorkerNameFormat = default_worker_name_format
) -> None:
    """Open a transport for this process's calls. Every rank calls it.

    Args:
        transport: the transport.
        worker_name_format: the function that made the transport's names, for
            `WorldInfo.worker_name`.
    """
    global _transport
    _transport = transport  # other workers' requests may arrive before `open` returns
    set_worker_name_format(worker_name_format)
    _barriers.clear()
    try:
        transport.open()
    except BaseException:
        _remove_transport()
        raise


def _remove_transport() -> None:
    global _transport
    _transport = None
    set_worker_name_format(default_worker_name_format)


def shutdown_rpc(graceful: bool = True) -> None:
    """Close the transport, if one is open.

    Args:
        graceful: whether to wait until every rank has called it. If False, leave at once, as after
            an error.

    Raises:
        WorkerLostError: a rank died or stopped answering, and `graceful` is True.
    """
    if _transport is None:
        return
    transport = _transport
    try:
        if graceful:
            if not request_threads.wait(REQUEST_SECONDS, own=True):
                _log.warning(CALL_STILL_RUNS)
            wait_for_workers("shutdown", transport.names, timeout=None)
    except BaseException:
        graceful = False
        raise
    finally:
        try:
            transport.close(graceful)
        finally:
            _remove_transport()


def current_transport() -> Transport:
    """The open transport.

    Raises:
        RuntimeError: no transport is open.
    """
    if _transport is None:
        raise RuntimeError(
            "RPC is not initialized: call this from a function under @auto_init_rpc()."
        )
    return _transport


def rpc_is_initialized() -> bool:
    """Whether this process can currently call other workers."""
    return _transport is not None


def get_worker_id(id: str | int | None = None) -> int:
    """A worker's rank.

    Args:
        id: a worker's name or rank; None for this process.

    Raises:
        UserError: there is no such worker.
    """
    if id is None:
        return get_world_info().rank
    size = get_world_info().world_size
    if isinstance(id, numbers.Integral):
        id = int(id)
        if not 0 <= id < size:
            raise UserError(f"there is no worker {id}: with {size} workers choose 0 to {size - 1}.")
        return id
    if _transport is not None:
        names = _transport.names
    else:
        names = [default_worker_name_format(rank, size, 0, 1) for rank in range(size)]
    if id not in names:
        raise UserError(f"there is no worker named {id!r}: the workers are {', '.join(names)}.")
    return names.index(id)


def describe_worker(name: str) -> str:
    """A worker's name, its rank and, in a job, its machine, for messages."""
    names, hosts = current_transport().names, current_job().hosts
    if name not in names:
        return name
    rank = names.index(name)
    host = f" on {hosts[rank]}" if rank < len(hosts) else ""
    return f"{name} (rank {rank}{host})"


def require_alive(workers: Iterable[str], deadline: float = math.inf) -> None:
    """Ping workers, in parallel.

    Args:
        workers: the workers' names.
        deadline: the time on `time.monotonic` until which it waits for answers. A worker that has
            not answered then is not lost, unless its ping has failed.

    Raises:
        WorkerLostError: a worker does not answer; the message names it.
    """
    transport = current_transport()
    pings = [(worker, transport.ping(worker)) for worker in workers]
    for worker, ping in pings:
        if not wait_until(ping.done, deadline - time.monotonic(), pause=0.005):
            continue
        try:
            ping.wait()
        except RuntimeError as error:
            raise WorkerLostError(
                f"{describe_worker(worker)} does not answer ({first_line(error)}).",
                transport.names.index(worker),
            ) from None


def barrier(worker_names: Iterable[str | int] | None = None, timeout: float | None = 60.0) -> None:
    """Wait until all workers, or the named ones, have called it too.

    Args:
        worker_names: the names or ranks of the workers that wait for each other; None for all. Any
            other worker returns at once.
        timeout: seconds to wait for the others; None to wait while they answer pings. The shortest
            of the workers' timeouts ends the barrier for all.

    Raises:
        WorkerLostError: a worker died, does not answer, or did not arrive in time; the message
            names it. Raised on all workers of the barrier.
    """
    names = current_transport().names
    ranks = range(len(names)) if worker_names is None else map(get_worker_id, worker_names)
    wait_for_workers("barrier", [names[rank] for rank in sorted(set(ranks))], timeout)


_FIRST, _OUTCOME, _ALL_ARRIVED = "first", "outcome", "all arrived"
"""Keys of a barrier, and its outcome if it succeeds.

The worker that arrives first pings the missing workers, and all others ping that worker. The first
outcome that is set holds for all workers.
"""


def wait_for_workers(topic: str, workers: list[str], timeout: float | None) -> None:
    """A barrier of `workers` in the transport's store.

    The barriers of a topic are numbered in the order in which each worker calls them, so that a
    barrier that failed on some workers does not affect other topics.
    """
    transport = current_transport()
    own_name = transport.names[get_world_info().rank]
    if own_name not in workers:
        return
    # Keys stay in the store, so they are short.
    group = hashlib.sha256("/".join([topic, *workers]).encode()).hexdigest()[:16]
    _barriers[group] += 1
    store = dist.PrefixStore(f"{group}#{_barriers[group]}", transport.store)
    keys = {worker: str(transport.names.index(worker)) for worker in workers}
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    with store_errors_as_worker_lost():
        store.set(keys[own_name], "")
        arrived = store.add("arrived", 1)
        if arrived == len(workers):
            store.compare_set(_OUTCOME, "", _ALL_ARRIVED)
        if arrived == 1:
            store.set(_FIRST, own_name)
        while wait_for_keys(
            store, [_OUTCOME], max(0.0, min(PING_INTERVAL, deadline - time.monotonic()))
        ):
            try:
                if arrived == 1 or time.monotonic() >= deadline:
                    _check_arrivals(store, topic, keys, timeout, deadline)
                elif store.check([_FIRST]):
                    require_alive([store.get(_FIRST).decode()], deadline)
            except WorkerLostError as error:  # for all workers of the barrier
                store.compare_set(_OUTCOME, "", json.dumps([str(error), error.rank]))
        outcome = store.get(_OUTCOME).decode()
        if outcome != _ALL_ARRIVED:
            raise WorkerLostError(*json.loads(outcome))


def _check_arrivals(
    store: dist.Store, topic: str, keys: dict[str, str], timeout: float | None, deadline: float
) -> None:
    """Complete a barrier if no worker is absent; else ping the absent ones, until the deadline.

    Raises:
        WorkerLostError: an absent worker does not answer, or did not arrive in time.
    """
    timed_out = time.monotonic() >= deadline
    missing = missing_keys(store, [*keys.values()])
    absent = [worker for worker, key in keys.items() if key in missing]
    if not absent:  # the worker that arrived last has died
        store.compare_set(_OUTCOME, "", _ALL_ARRIVED)
    elif timed_out:
        raise WorkerLostError(
            f"{topic} of {', '.join(keys)}: {', '.join(map(describe_worker, absent))} did not "
            f"arrive within {timeout:g} s.",
            int(keys[absent[0]]),
        )
    else:
        require_alive(absent, deadline)
