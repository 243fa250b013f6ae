"""How the processes of a world find each other: a key space that no dead process has touched.

torchrun gives every process a key-value store, but the store outlives a restart: what dead
processes wrote in it is still there. Here all live ranks meet under a session name that rank zero
draws afresh and that counts only once rank zero has confirmed every rank's own nonce. It needs no
restart count (agents keep their own, and they can differ) and no count of calls.
"""

import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from metadist.distributed.lost import AllGaveUp, NeverCame, PeerLost
from metadist.distributed.world import get_world_info, is_single_node
from metadist.errors import UserError

MEETING_TIMEOUT = 300.0
"""Seconds that ranks may start apart from each other (nodes boot, imports are slow)."""

_POLL_SECONDS = 0.005
_SLOWEST_POLL_SECONDS = 0.1
_LATER_SECONDS = 1.0

_base_store: dist.Store | None = None


def world_store(timeout: float = MEETING_TIMEOUT) -> dist.Store:
    """The world's key-value store, shared by all ranks and all restarts. Any rank, any time.

    Under torchrun it is the agent's store, else rank zero's at MASTER_ADDR:MASTER_PORT; a single
    process has one in memory.

    Args:
        timeout: seconds to wait for the store, the first time.

    Raises:
        PeerLost: nobody keeps a store there.
        UserError: the environment does not say where it is.
    """
    global _base_store
    if _base_store is None:
        if get_world_info().world_size == 1:
            _base_store = dist.HashStore()
        else:
            keep = get_world_info().rank == 0 and not _agent_keeps_store()
            _base_store = _connect(timeout, keep)
    return _base_store


def another_connection(timeout: float) -> dist.Store:
    """The same store through a connection of its own, which no other thread's waiting blocks."""
    store = world_store(timeout)
    return store if isinstance(store, dist.HashStore) else _connect(timeout, keep=False)


def _connect(timeout: float, keep: bool) -> dist.Store:
    """Connect to the world's store; with `keep`, this process keeps it."""
    try:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except (KeyError, ValueError) as error:
        raise UserError(
            f"MASTER_ADDR and MASTER_PORT must say where rank zero is ({error}); start the script "
            "with torchrun, which sets them."
        ) from None
    listening: int | None = None
    if not _agent_keeps_store() and is_single_node():
        # By itself a store would listen on all interfaces.
        host = "127.0.0.1"
        listening = _listen(host, port) if keep else None
    with _reaching(f"the world's store at {host}:{port}"):
        return dist.TCPStore(
            host,
            port,
            is_master=keep,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
            master_listen_fd=listening,
        )


def _agent_keeps_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


@contextlib.contextmanager
def _reaching(what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # of which torch's own errors are kinds
        reason = str(error).strip().splitlines()[0]
        raise PeerLost(f"{what} cannot be reached ({reason}).") from None


def _listen(host: str, port: int) -> int:
    """The descriptor of a socket that listens for the store."""
    try:
        return socket.create_server((host, port), backlog=1024).detach()
    except OSError as error:
        raise UserError(
            f"MASTER_PORT={port} cannot be listened on ({error.strerror}): choose a free port."
        ) from None


def meet(topic: str, timeout: float = MEETING_TIMEOUT) -> dist.Store:
    """Meet all other ranks of this attempt. Every rank must call it.

    Args:
        topic: what the meeting is for; ranks meet those with the same topic.
        timeout: seconds to wait for the others.

    Returns:
        An empty key space that exactly the ranks that met share.

    Raises:
        NeverCame: some ranks did not come; rank zero's message names them. It is a `PeerLost`
            and a `TimeoutError`; `AllGaveUp` on those who came.
    """
    info = get_world_info()
    store = dist.PrefixStore(f"metadist/{topic}", world_store(timeout))
    with _reaching("the world's store"):
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
            sentence = (
                f"ranks {sorted(missing)} of a world of {world_size} did not arrive within "
                f"{timeout:g} s: they died, never started or cannot reach rank zero."
            )
            store.set(f"{session}/given up", json.dumps({"sentence": sentence, "came": nonces}))
            raise NeverCame(sentence)
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
        # An old session is confirmed or given up too, but not with this process's nonce.
        if joined and store.check([f"{joined}/confirmed"]):
            confirmed = json.loads(store.get(f"{joined}/confirmed"))
            if confirmed.get(str(rank)) == nonce:
                return joined
        if joined and store.check([f"{joined}/given up"]):
            given_up = json.loads(store.get(f"{joined}/given up"))
            if given_up["came"].get(str(rank)) == nonce:
                raise AllGaveUp(f"rank zero waits no longer: {given_up['sentence']}")
        # Somewhat later than rank zero, which knows who is missing.
        if time.monotonic() > deadline + _LATER_SECONDS:
            raise NeverCame(
                f"rank {rank} waited {timeout:g} s for rank zero to open the meeting: it died, "
                "never started or cannot be reached."
            )
        time.sleep(_POLL_SECONDS)


def exchange(store: dist.Store, name: str, value: Any, timeout: float | None) -> list[Any]:
    """Give every rank every rank's `value`. All ranks of a meeting call it, once a `name`.

    Args:
        store: a meeting's key space.
        name: what is exchanged.
        value: this rank's word, of what JSON can carry.
        timeout: seconds to wait for the others; None where something else (a `Pulse`) sees to it
            that nobody waits for the dead.

    Returns:
        The words in the order of the ranks.

    Raises:
        NeverCame: some ranks gave no word in time; the message names them.
    """
    info = get_world_info()
    keys = [f"{name}/{rank}" for rank in range(info.world_size)]
    deadline = None if timeout is None else time.monotonic() + timeout
    pause = _POLL_SECONDS
    with _reaching("the world's store"):
        store.set(keys[info.rank], json.dumps(value))
        # Waiting inside the store would be deaf to signals.
        while not store.check(keys):
            if deadline is not None and time.monotonic() > deadline:
                missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
                raise NeverCame(f"ranks {missing} gave no word about {name!r} in {timeout:g} s.")
            time.sleep(pause)
            pause = min(pause * 1.1, _SLOWEST_POLL_SECONDS)
        return [json.loads(store.get(key)) for key in keys]
