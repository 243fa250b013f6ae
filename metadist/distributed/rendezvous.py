"""Rendezvous of a job's processes under a fresh prefix of the key-value store.

torchrun's store outlives a restart, together with the keys of dead processes. The live ranks
therefore agree on a random session name that counts only once rank zero has confirmed the nonce of
every rank. This needs neither a restart count (each agent keeps its own) nor a count of calls.
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

from metadist.distributed.errors import (
    RendezvousClosedError,
    RendezvousTimeoutError,
    WorkerLostError,
    first_line,
)
from metadist.distributed.world import get_world_info, is_single_node
from metadist.errors import UserError

RENDEZVOUS_TIMEOUT = 300.0
"""Seconds that ranks may start apart: nodes boot, imports are slow."""

_POLL_SECONDS = 0.005
_MAX_POLL_SECONDS = 0.1

_store: dist.Store | None = None


def world_store(timeout: float = RENDEZVOUS_TIMEOUT) -> dist.Store:
    """The job's key-value store, shared by all ranks and all restarts. Any rank, any time.

    Under torchrun it is the agent's store, else rank zero's at MASTER_ADDR:MASTER_PORT; a single
    process has one in memory.

    Args:
        timeout: seconds to wait for the store, in the first call.

    Raises:
        WorkerLostError: nothing listens there.
        UserError: the environment does not name its address.
    """
    global _store
    if _store is None:
        info = get_world_info()
        if info.world_size == 1:
            _store = dist.HashStore()
        else:
            _store = _connect(timeout, host=info.rank == 0 and not _agent_hosts_store())
    return _store


def connect_store(timeout: float) -> dist.Store:
    """The job's store over a new connection, which other threads' requests do not block."""
    store = world_store(timeout)
    return store if isinstance(store, dist.HashStore) else _connect(timeout, host=False)


def _connect(timeout: float, host: bool) -> dist.Store:
    try:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except (KeyError, ValueError) as error:
        raise UserError(
            f"MASTER_ADDR and MASTER_PORT must hold the address of rank zero ({error}); start the "
            "script with torchrun, which sets them."
        ) from None
    listening: int | None = None
    if not _agent_hosts_store() and is_single_node():
        address = "127.0.0.1"  # by default a store listens on all interfaces
        listening = _listen(address, port) if host else None
    with _store_errors_as_worker_lost(f"the job's store at {address}:{port}"):
        return dist.TCPStore(
            address,
            port,
            is_master=host,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
            master_listen_fd=listening,
        )


def _agent_hosts_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _listen(address: str, port: int) -> int:
    """The descriptor of a listening socket for the store."""
    try:
        return socket.create_server((address, port), backlog=1024).detach()
    except OSError as error:
        raise UserError(
            f"MASTER_PORT={port} cannot be bound ({error.strerror}): choose a free port."
        ) from None


@contextlib.contextmanager
def _store_errors_as_worker_lost(store: str = "the job's store") -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch.distributed's errors are subclasses
        raise WorkerLostError(f"{store} cannot be reached ({first_line(error)}).") from None


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
    with _store_errors_as_worker_lost():
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
    with _store_errors_as_worker_lost():
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


@contextlib.contextmanager
def bound_to_loopback() -> Iterator[None]:
    """In a job on one node, sockets of RPC and Gloo opened inside bind to loopback.

    Interfaces that the user named in the environment stay.
    """
    added = []
    if is_single_node():
        interfaces = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
        for variable in ("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
            if interfaces and variable not in os.environ:
                os.environ[variable] = interfaces[0]
                added.append(variable)
    try:
        yield
    finally:
        for variable in added:
            del os.environ[variable]
