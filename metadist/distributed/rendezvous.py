"""Rendezvous of a job's processes under a fresh prefix of the key-value store.

Under torchrun the store and the keys of dead processes survive a restart. The live ranks therefore
agree on a random session name, which is valid once rank zero has confirmed the nonce of every rank.
This needs neither a restart count (each agent has its own) nor a count of calls.
"""

import json
import secrets
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from metadist.deadlines import wait_until
from metadist.distributed.errors import RendezvousClosedError, RendezvousTimeoutError
from metadist.distributed.store import (
    RENDEZVOUS_TIMEOUT,
    Counters,
    store_errors_as_worker_lost,
    world_store,
)
from metadist.distributed.world import get_world_info

_POLL_SECONDS = 0.005
_MAX_POLL_SECONDS = 0.1
_MAX_POLLS_PER_SECOND = 1000.0
"""The limit for all ranks together, once they have waited for a while; a store can serve more."""


def rendezvous(topic: str, timeout: float = RENDEZVOUS_TIMEOUT) -> dist.Store:
    """Wait for all other ranks. Every rank calls it.

    Args:
        topic: the name of the rendezvous; ranks with the same topic take part.
        timeout: seconds to wait for the others.

    Returns:
        A store under a fresh prefix that exactly these processes share.

    Raises:
        RendezvousTimeoutError: ranks are missing; rank zero's message names them. The other ranks
            that arrived raise the subclass `RendezvousClosedError`.
    """
    info = get_world_info()
    store = dist.PrefixStore(f"metadist/{topic}", world_store(timeout))
    with store_errors_as_worker_lost():
        if info.rank == 0:
            session = host_rendezvous(store, info.world_size, timeout)
        else:
            session = join_rendezvous(store, info.rank, timeout)
    return dist.PrefixStore(session, store)


def host_rendezvous(store: dist.Store, world_size: int, timeout: float) -> str:
    """Rank zero's side of `rendezvous`; returns the name of the confirmed session.

    It polls one counter, then reads all nonces at once and publishes them as one value.
    """
    session = secrets.token_hex(8)
    counter = f"{session}/arrived"
    keys = {rank: f"{session}/joined/{rank}" for rank in range(1, world_size)}

    def all_joined() -> bool:
        # A restarted rank may have been counted twice.
        return int(store.get(counter)) >= len(keys) and store.check([*keys.values()])

    store.add(counter, 0)  # reading a key that is not set would wait
    store.set("session", session)
    _poll(all_joined, timeout)
    nonces = read_present(store, keys)
    missing = sorted(keys.keys() - nonces.keys())
    message = ""
    if missing:
        message = (
            f"ranks {missing} (world size {world_size}) did not arrive within {timeout:g} s: they "
            "died, never started or cannot reach rank zero."
        )
    store.set(f"{session}/outcome", json.dumps({"message": message, "nonces": nonces}))
    if missing:
        raise RendezvousTimeoutError(message)
    return session


def join_rendezvous(store: dist.Store, rank: int, timeout: float) -> str:
    """Another rank's side of `rendezvous`; returns the name of the confirmed session.

    Rank zero may open the rendezvous just before `timeout`, and then waits that long itself.
    """
    nonce = secrets.token_hex(8)
    joined = ended = ""
    own_timeout = timeout + 1.0  # rank zero knows which ranks are missing, so it times out first
    deadline = open_deadline = time.monotonic() + own_timeout
    joined_at = 0.0

    def is_over() -> bool:
        nonlocal joined, joined_at, ended, deadline
        session = store.get("session").decode() if joined or store.check(["session"]) else ""
        if session != joined:
            store.set(f"{session}/joined/{rank}", nonce)
            store.add(f"{session}/arrived", 1)
            joined, joined_at = session, time.monotonic()
            if joined_at < open_deadline:  # so that restarts of rank zero cannot extend it forever
                deadline = joined_at + own_timeout
        # A session of dead processes has an outcome too, but without this nonce.
        if joined in ("", ended) or not store.check([f"{joined}/outcome"]):
            return False
        ended = joined
        outcome = json.loads(store.get(f"{joined}/outcome"))
        if outcome["nonces"].get(str(rank)) != nonce:
            return False
        if outcome["message"]:
            raise RendezvousClosedError(f"rank zero closed the rendezvous: {outcome['message']}")
        return True

    while (seconds := deadline - time.monotonic()) > 0:
        if _poll(is_over, seconds):
            return joined
    if joined in ("", ended):
        message = (
            f"rank {rank} waited {timeout:g} s for rank zero to open the rendezvous: it died, "
            "never started or cannot be reached."
        )
    else:
        message = (
            f"rank zero opened the rendezvous that rank {rank} joined, but did not confirm it "
            f"within {time.monotonic() - joined_at:.3g} s: it died, froze or cannot be reached."
        )
    raise RendezvousTimeoutError(message, rank=0)


def all_gather_object(store: dist.Store, name: str, value: Any, timeout: float | None) -> list[Any]:
    """Gather every rank's value on all ranks. All ranks of a rendezvous call it, once per `name`.

    The rank that arrives last reads all values at once and publishes them as one value, so that the
    store's work is proportional to the number of ranks.

    Args:
        store: the rendezvous' store.
        name: the name of the gathered values.
        value: this rank's value, of types that JSON can represent.
        timeout: seconds to wait for the others; None if a `Heartbeat` detects lost ranks.

    Returns:
        The values in the order of the ranks.

    Raises:
        RendezvousTimeoutError: some ranks did not report in time; the message names them.
    """
    keys, combined_key = _gathered_keys(name), f"{name}/all"
    with store_errors_as_worker_lost():
        report_object(store, name, value)
        if wait_for_keys(store, [combined_key], timeout):
            missing = set(missing_keys(store, keys))
            if ranks := [rank for rank, key in enumerate(keys) if key in missing]:
                raise RendezvousTimeoutError(
                    f"ranks {ranks} did not report {name!r} in {timeout:g} s."
                )
            _publish(store, name)  # the rank that arrived last has died
        return json.loads(store.get(combined_key))


def report_object(store: dist.Store, name: str, value: Any) -> None:
    """Report this rank's value to `all_gather_object` without waiting for the other ranks.

    Args:
        store: the rendezvous' store.
        name: the name of the gathered values.
        value: this rank's value, of types that JSON can represent.
    """
    keys = _gathered_keys(name)
    store.set(keys[get_world_info().rank], json.dumps(value))
    if store.add(f"{name}/count", 1) == len(keys):
        _publish(store, name)


def _gathered_keys(name: str) -> list[str]:
    return [f"{name}/{rank}" for rank in range(get_world_info().world_size)]


def _publish(store: dist.Store, name: str) -> None:
    values = store.multi_get(_gathered_keys(name))
    store.set(f"{name}/all", f"[{b','.join(values).decode()}]")


def wait_for_keys(store: dist.Store, keys: list[str], timeout: float | None) -> list[str]:
    """Poll until all keys are set, and return the keys that are missing after `timeout` seconds.

    It polls because a wait inside the store would block signal handlers.
    """
    return [] if _poll(lambda: store.check(keys), timeout) else missing_keys(store, keys)


def missing_keys(store: Counters, keys: list[str]) -> list[str]:
    """The keys that are not set, by bisection, which needs few requests if few are missing."""
    if store.check(keys):
        return []
    if len(keys) == 1:
        return keys
    half = len(keys) // 2
    return missing_keys(store, keys[:half]) + missing_keys(store, keys[half:])


def read_present(store: Counters, keys: dict[int, str]) -> dict[int, str]:
    """Read the values of the ranks whose keys are set, in few requests.

    Args:
        store: the store.
        keys: the key of each rank.
    """
    missing = set(missing_keys(store, [*keys.values()]) if keys else [])
    present = {rank: key for rank, key in keys.items() if key not in missing}
    values = store.multi_get([*present.values()]) if present else []
    return {rank: value.decode() for rank, value in zip(present, values, strict=True)}


def _poll(is_ready: Callable[[], bool], timeout: float | None) -> bool:
    """Poll the store until `is_ready`, and return whether it was within `timeout` seconds.

    The pauses grow with time, up to a limit that is higher with many ranks.
    """
    longest_pause = max(_MAX_POLL_SECONDS, get_world_info().world_size / _MAX_POLLS_PER_SECOND)
    return wait_until(is_ready, timeout, _POLL_SECONDS, longest_pause)
