"""How the processes of a world find each other: a key space that no dead process has touched.

torchrun gives every process a key-value store, but the store outlives a restart: what dead
processes wrote in it is still there. Here all live ranks meet under a session name that rank zero
draws afresh and that counts only once rank zero has confirmed every rank's own nonce. It needs no
restart count (agents keep their own, and they can differ) and no count of calls.
"""

import json
import secrets
import time
from datetime import timedelta

import torch.distributed as dist

from metadist.distributed.world import get_world_info

MEETING_TIMEOUT = 300.0
"""Seconds that ranks may start apart from each other (nodes boot, imports are slow)."""

_POLL_SECONDS = 0.005

_base_store: dist.Store | None = None


def world_store() -> dist.Store:
    """The world's key-value store, shared by all ranks and all restarts. Any rank, any time.

    Under torchrun it is the agent's store, else rank zero's at MASTER_ADDR:MASTER_PORT; a single
    process has one in memory.
    """
    global _base_store
    if _base_store is None:
        info = get_world_info()
        if info.world_size == 1:
            _base_store = dist.HashStore()
        else:
            handshake = dist.rendezvous(
                "env://", info.rank, info.world_size, timeout=timedelta(seconds=MEETING_TIMEOUT)
            )
            _base_store, _, _ = next(iter(handshake))
    return _base_store


def meet(topic: str, timeout: float = MEETING_TIMEOUT) -> dist.Store:
    """Meet all other ranks of this attempt. Every rank must call it.

    Args:
        topic: what the meeting is for; ranks meet those with the same topic.
        timeout: seconds to wait for the others.

    Returns:
        An empty key space that exactly the ranks that met share.

    Raises:
        TimeoutError: some ranks did not come; rank zero's message names them.
    """
    info = get_world_info()
    store = dist.PrefixStore(f"metadist/{topic}", world_store())
    if info.rank == 0:
        session = _host_meeting(store, info.world_size, timeout)
    else:
        session = _attend_meeting(store, info.rank, timeout)
    return dist.PrefixStore(session, store)


def _host_meeting(store: dist.Store, world_size: int, timeout: float) -> str:
    session = secrets.token_hex(8)
    store.set("session", session)
    missing = set(range(1, world_size))
    nonces: dict[int, str] = {}
    deadline = time.monotonic() + timeout
    while missing:
        for rank in sorted(missing):
            if store.check([f"{session}/joined/{rank}"]):
                nonces[rank] = store.get(f"{session}/joined/{rank}").decode()
        missing -= nonces.keys()
        if missing and time.monotonic() > deadline:
            raise TimeoutError(
                f"ranks {sorted(missing)} of a world of {world_size} did not arrive within "
                f"{timeout:g} s: they died, never started or cannot reach rank zero."
            )
        if missing:
            time.sleep(_POLL_SECONDS)
    store.set(f"{session}/confirmed", json.dumps(nonces))
    return session


def _attend_meeting(store: dist.Store, rank: int, timeout: float) -> str:
    nonce = secrets.token_hex(8)
    joined = ""
    deadline = time.monotonic() + timeout
    while True:
        session = store.get("session").decode() if store.check(["session"]) else ""
        if session and session != joined:
            store.set(f"{session}/joined/{rank}", nonce)
            joined = session
        # An old session is confirmed too, but not with this process's nonce.
        if joined and store.check([f"{joined}/confirmed"]):
            confirmed = json.loads(store.get(f"{joined}/confirmed"))
            if confirmed.get(str(rank)) == nonce:
                return joined
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"rank {rank} waited {timeout:g} s for rank zero to open the meeting: it died, "
                "never started or cannot be reached."
            )
        time.sleep(_POLL_SECONDS)


def exchange(store: dist.Store, name: str, value: str, timeout: float) -> list[str]:
    """Give every rank every rank's `value`. All ranks of a meeting call it, once a `name`.

    Args:
        store: a meeting's key space.
        name: what is exchanged.
        value: this rank's text.
        timeout: seconds to wait for the others.

    Returns:
        The texts in the order of the ranks.
    """
    info = get_world_info()
    store.set(f"{name}/{info.rank}", value)
    keys = [f"{name}/{rank}" for rank in range(info.world_size)]
    try:
        store.wait(keys, timedelta(seconds=timeout))
    except dist.DistStoreError:
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        raise TimeoutError(
            f"ranks {missing} gave no word about {name!r} within {timeout:g} s."
        ) from None
    return [store.get(key).decode() for key in keys]
