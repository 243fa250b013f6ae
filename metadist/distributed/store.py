"""The job's key-value store: its location, its host, and who can reach it.

A process that can write to the store determines the addresses to which RPC connects, and RPC runs
code. The store of torchrun's agent listens on all interfaces without authentication, so addresses
are exchanged over it only between nodes. On one node, the workers of torchrun share a file in the
agent's log directory, which only this user can read; without torchrun, they share rank zero's store
on the loopback interface.
"""

import atexit
import contextlib
import errno
import functools
import ipaddress
import multiprocessing.util
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch.distributed as dist

from metadist.deadlines import wait_until
from metadist.distributed.errors import WorkerLostError
from metadist.distributed.world import (
    get_world_info,
    host_name,
    is_single_node,
    launched_by_torchrun,
    parent_is_agent,
)
from metadist.errors import UserError, first_line

RENDEZVOUS_TIMEOUT = 300.0
"""Seconds to wait for all ranks to start: nodes boot, and imports are slow."""

_EXIT_TIMEOUT = 30.0
"""Seconds that rank zero, which hosts the store, waits at its exit for the other ranks' exit."""

_LEAVE_TIMEOUT = 2.0
"""Seconds that another rank waits at its exit for its write to the store."""

_store: dist.Store | None = None
_world: tuple[object, ...] = ()
"""The process and the variables of the world that `_store` is for."""


class Counters(Protocol):
    """The part of `dist.Store` that heartbeats need every second."""

    def set(self, key: str, value: str) -> None:
        """Set a key."""

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are set."""

    def multi_get(self, keys: list[str]) -> Sequence[bytes]:
        """The values of keys that are set."""


class FileCounters:
    """Short values, one in each file. A `FileStore` would grow with every write.

    Args:
        directory: the directory of the files; it is created.
    """

    _WIDTH = 24

    def __init__(self, directory: Path) -> None:
        directory.mkdir(mode=0o700, exist_ok=True)
        self._directory = directory

    def set(self, key: str, value: str) -> None:
        """Set a key. The value is overwritten in place, so that a full disk does not matter."""
        descriptor = os.open(self._path(key), os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, value.encode().ljust(self._WIDTH))
        finally:
            os.close(descriptor)

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are set."""
        return all(self._path(key).exists() for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """The values of keys that are set."""
        return [self._path(key).read_bytes().strip() for key in keys]

    def _path(self, key: str) -> Path:
        return self._directory / key.replace("/", "-")


def world_store(timeout: float = RENDEZVOUS_TIMEOUT) -> dist.Store:
    """The job's key-value store, shared by all ranks and, under torchrun, all restarts.

    Any rank may call it at any time. On one node, it is a file under torchrun, else rank zero's
    store on loopback. On several nodes, it is the agent's store under torchrun, else rank zero's
    store at MASTER_ADDR:MASTER_PORT. A single process has a store in memory, but for a worker of
    torchrun: it shares the file with its restarts, if the log directory is private.

    Args:
        timeout: seconds to wait for the store, in the first call.

    Raises:
        WorkerLostError: the store cannot be reached.
        UserError: the environment does not contain the store's address, or torchrun's log directory
            is not private.
    """
    global _store, _world
    info = get_world_info()
    address = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    world = (os.getpid(), info.rank, info.world_size, *address)
    if _store is None or _world != world:  # another one after a fork, or in a notebook
        if _is_file_store():
            _store = _open_file_store()
        elif info.world_size == 1:
            _store = dist.HashStore()
        elif _agent_hosts_store():
            _store = _connect(timeout)
        else:
            _store = _connect(timeout, host=info.rank == 0)
            if info.rank:
                _store.set(f"metadist/connected/{info.rank}", "")
                _leave_at_exit(_store, info.rank)
            else:
                _call_at_exit(functools.partial(_outlive_other_ranks, _store, info.world_size))
        _world = world
    return _store


def connect_store(timeout: float) -> dist.Store:
    """The job's store over a new connection, which other threads' requests do not block."""
    store = world_store(timeout)
    if isinstance(store, dist.HashStore):
        return store
    return _open_file_store() if _is_file_store() else _connect(timeout)


def node_name() -> str:
    """A name that is equal on the ranks of one node, which share `heartbeat_counters`: the ranks of
    one torchrun agent or, without torchrun, of one machine.
    """
    return f"{host_name()} {_shared_directory() or ''}"


def heartbeat_counters(prefix: str, store: dist.Store) -> Counters:
    """The heartbeat counters of a node's ranks: files in the log directory of torchrun's agent, or
    `store` if there is no such directory. Files need no messages.
    """
    directory = _shared_directory()
    if directory is None:
        return store
    return FileCounters(directory / f"metadist-{prefix.replace('/', '-')}")


def _shared_directory() -> Path | None:
    """The agent's log directory; None if there is none or, on several nodes, it is not private."""
    return _agent_directory() if _is_file_store() else _private_directory()


def _private_directory() -> Path | None:
    with contextlib.suppress(UserError):
        return _agent_directory() if launched_by_torchrun() else None
    return None


def elastic_store() -> dist.Store:
    """The store that survives when nodes join or leave: the agent's store, or `world_store`.

    Other machines can write to the agent's store. On one node, nothing that determines the
    addresses to which RPC connects may be read from it.
    """
    store = world_store()
    if _is_file_store() and _agent_hosts_store():
        return _connect(RENDEZVOUS_TIMEOUT)
    return store


def _is_file_store() -> bool:
    if not (launched_by_torchrun() and is_single_node()):
        return False
    several = get_world_info().world_size > 1
    return several or (parent_is_agent() and _private_directory() is not None)


def _agent_hosts_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _open_file_store() -> dist.Store:
    return dist.FileStore(str(_agent_directory() / "metadist-store"), -1)


def _agent_directory() -> Path:
    """The log directory that torchrun's agent has created for this run with `mkdtemp`.

    Every worker knows it without asking another process: its error file is
    DIRECTORY/attempt_N/LOCAL_RANK/error.json (torch.distributed.elastic's `DefaultLogsSpecs`).

    Raises:
        UserError: there is no such directory, or other users can open it.
    """
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    directory = Path(error_file).parent.parent.parent
    try:
        status = directory.lstat()
        private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
        if error_file and private and status.st_uid == os.geteuid():
            return directory
        reason = "other users can open it" if error_file else "there is none"
    except OSError as error:
        reason = str(error.strerror)
    raise UserError(
        f"the workers of one node exchange addresses in torchrun's log directory ({reason}): start "
        "torchrun without --log-dir and --logs-specs, or with a --log-dir on a local file system."
    )


def _connect(timeout: float, host: bool = False) -> dist.Store:
    try:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        if not 0 < port < 2**16:
            raise ValueError(f"there is no port {port}")
    except (KeyError, ValueError) as error:
        raise UserError(
            f"MASTER_ADDR and MASTER_PORT must hold the address of rank zero ({error}); start the "
            "script with torchrun, which sets them."
        ) from None
    if not _agent_hosts_store() and is_single_node():
        address = "127.0.0.1"
    with store_errors_as_worker_lost(f"the job's store at {address}:{port}"):
        return dist.TCPStore(
            address,
            port,
            is_master=host,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
            master_listen_fd=_listen(address, port) if host else None,
        )


def _listen(address: str, port: int) -> int | None:
    """The descriptor of a listening socket for the store, bound to one address of this machine.

    Returns:
        The descriptor, or None if the address that other nodes use is not an address of this
        machine: a host name that resolves to loopback here (Debian's 127.0.1.1), or a translated
        address. The store then listens on all interfaces.
    """
    try:
        addresses = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except OSError:
        return None
    for family, _, _, _, (host, *_) in addresses:
        if ipaddress.ip_address(str(host).split("%")[0]).is_loopback and not is_single_node():
            continue
        try:
            server = socket.create_server((str(host), port), family=family, backlog=1024)
        except OSError as error:
            if error.errno in _NOT_OWN_ADDRESS:
                continue
            raise UserError(
                f"MASTER_PORT={port} cannot be bound ({error.strerror}): choose a free port."
            ) from None
        return server.detach()
    return None


_NOT_OWN_ADDRESS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


@contextlib.contextmanager
def store_errors_as_worker_lost(store: str = "the job's store") -> Iterator[None]:
    """Raise torch's errors of an unreachable store as `WorkerLostError`."""
    try:
        yield
    except RuntimeError as error:  # torch.distributed's errors are subclasses
        raise WorkerLostError(f"{store} cannot be reached ({first_line(error)}).") from None


def _call_at_exit(function: Callable[[], None]) -> None:
    """Call a function when this process exits. Processes of multiprocessing run no `atexit`."""
    if multiprocessing.parent_process() is None:
        atexit.register(function)
    else:
        multiprocessing.util.Finalize(None, function, exitpriority=0)


def _outlive_other_ranks(store: dist.Store, size: int) -> None:
    """Wait at exit for the other ranks that are connected to this process's store.

    They may still poll the store or write their last heartbeat.
    """
    deadline = time.monotonic() + _EXIT_TIMEOUT
    with contextlib.suppress(RuntimeError):
        for rank in range(1, size):
            has_left = functools.partial(_has_left, store, rank)
            wait_until(has_left, deadline - time.monotonic(), pause=0.02)


def _has_left(store: dist.Store, rank: int) -> bool:
    return not store.check([f"metadist/connected/{rank}"]) or store.check([f"metadist/left/{rank}"])


def _leave_at_exit(store: dist.Store, rank: int) -> None:
    """At exit, tell rank zero, which hosts the store, that this rank no longer needs it.

    A thread does, since rank zero may be unreachable. It starts now, because Python 3.12 starts
    none at exit.
    """
    exiting, left = threading.Event(), threading.Event()

    def leave() -> None:
        exiting.wait()
        with contextlib.suppress(RuntimeError):
            store.set(f"metadist/left/{rank}", "")
        left.set()

    def wait_for_leave() -> None:
        exiting.set()
        left.wait(_LEAVE_TIMEOUT)

    threading.Thread(target=leave, name="metadist-leave", daemon=True).start()
    _call_at_exit(wait_for_leave)
