"""Rendezvous of a job's processes under a fresh prefix of the key-value store.

Under torchrun the store outlives a restart, together with the keys of dead processes. The live
ranks therefore agree on a random session name that counts only once rank zero has confirmed the
nonce of every rank. This needs neither a restart count (each agent keeps its own) nor a count of
calls.
"""

import json
import secrets
import time
from typing import Any

import torch.distributed as dist

from metadist.distributed.errors import RendezvousClosedError, RendezvousTimeoutError
from metadist.distributed.store import (
    RENDEZVOUS_TIMEOUT,
    store_errors_as_worker_lost,
    world_store,
)
from metadist.distributed.world import get_world_info

_POLL_SECONDS = 0.005
_MAX_POLL_SECONDS = 0.1


def rendezvous(topic: str, timeout: float = RENDEZVOUS_TIMEOUT) -> dist.Store:
    """Wait for all other ranks. Every rank calls it.

    Args:
        topic: ranks meet those that called with the same topic.
        timeout: seconds to wait for the others.

    Returns:
        A store under a fresh prefix that exactly these processes share.

    Raises:
        RendezvousTimeoutError: ranks are missing; rank zero's message names them. The ranks that
            came get the subclass `RendezvousClosedError`.
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
    """Rank zero's side of `rendezvous`; the confirmed session's name."""
    session = secrets.token_hex(8)
    store.set("session", session)
    nonces: dict[int, str] = {}
    deadline = time.monotonic() + timeout
    while True:
        missing = [rank for rank in range(1, world_size) if rank not in nonces]
        for rank in missing:
            if store.check([f"{session}/joined/{rank}"]):
                nonces[rank] = store.get(f"{session}/joined/{rank}").decode()
        if len(nonces) == world_size - 1:
            store.set(f"{session}/confirmed", json.dumps(nonces))
            return session
        if time.monotonic() > deadline:
            missing = [rank for rank in missing if rank not in nonces]
            message = (
                f"ranks {missing} (world size {world_size}) did not arrive within {timeout:g} s: "
                "they died, never started or cannot reach rank zero."
            )
            store.set(f"{session}/closed", json.dumps({"message": message, "nonces": nonces}))
            raise RendezvousTimeoutError(message)
        time.sleep(_POLL_SECONDS)


def join_rendezvous(store: dist.Store, rank: int, timeout: float) -> str:
    """Another rank's side of `rendezvous`; the confirmed session's name."""
    nonce = secrets.token_hex(8)
    joined = ""
    # Rank zero knows which ranks are missing, so it times out first.
    deadline = time.monotonic() + timeout + 1.0
    while time.monotonic() < deadline:
        session = store.get("session").decode() if store.check(["session"]) else ""
        if session and session != joined:
            store.set(f"{session}/joined/{rank}", nonce)
            joined = session
        # A session of dead processes is confirmed or closed too, but without this nonce.
        if joined and store.check([f"{joined}/confirmed"]):
            if json.loads(store.get(f"{joined}/confirmed")).get(str(rank)) == nonce:
                return joined
        elif joined and store.check([f"{joined}/closed"]):
            closed = json.loads(store.get(f"{joined}/closed"))
            if closed["nonces"].get(str(rank)) == nonce:
                raise RendezvousClosedError(f"rank zero gave up: {closed['message']}")
        time.sleep(_POLL_SECONDS)
    raise RendezvousTimeoutError(
        f"rank {rank} waited {timeout:g} s for rank zero to open the rendezvous: it died, never "
        "started or cannot be reached.",
        rank=0,
    )


def all_gather_object(store: dist.Store, name: str, value: Any, timeout: float | None) -> list[Any]:
    """Give every rank every rank's `value`. All ranks of a rendezvous call it, once a `name`.

    Args:
        store: the rendezvous' store.
        name: what is gathered.
        value: this rank's value, of types that JSON represents.
        timeout: seconds to wait for the others; None where a `Heartbeat` detects lost ranks.

    Returns:
        The values in the order of the ranks.

    Raises:
        RendezvousTimeoutError: some ranks did not report in time; the message names them.
    """
    info = get_world_info()
    keys = [f"{name}/{rank}" for rank in range(info.world_size)]
    with store_errors_as_worker_lost():
        store.set(keys[info.rank], json.dumps(value))
        missing = wait_for_keys(store, keys, timeout)
        if missing:
            ranks = [keys.index(key) for key in missing]
            raise RendezvousTimeoutError(f"ranks {ranks} did not report {name!r} in {timeout:g} s.")
        return [json.loads(store.get(key)) for key in keys]


def wait_for_keys(store: dist.Store, keys: list[str], timeout: float | None) -> list[str]:
    """Poll until all keys are set; the keys that are missing after `timeout` seconds.

    A wait inside the store would block signal handlers.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    pause = _POLL_SECONDS
    while not store.check(keys):
        if deadline is not None and time.monotonic() > deadline:
            return [key for key in keys if not store.check([key])]
        time.sleep(pause)
        pause = min(pause * 1.1, _MAX_POLL_SECONDS)
    return []
