"""The one seam to `torch.distributed.rpc`: opening a world, ending it, and asking in it.

TensorPipe RPC pickles what it carries and asks for no password: whoever reaches its port can run
code. On one node every socket opened here is therefore bound to the loopback interface; on several
nodes to the interface that `TP_SOCKET_IFNAME` and `GLOO_SOCKET_IFNAME` name.
"""

import contextlib
import functools
import os
import socket
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import rpc

from metadist.distributed.meeting import MEETING_TIMEOUT, meet
from metadist.distributed.world import (
    WorkerNameFormat,
    default_worker_name_format,
    get_world_info,
    is_single_node,
)
from metadist.errors import UserError

P = ParamSpec("P")
T = TypeVar("T")

CALL_TIMEOUT = 300.0
"""Seconds a remote call may take, unless the call or the backend options say otherwise."""

HEARTBEAT_SECONDS = 2.0
"""How often a waiting worker asks whether the one it waits for still answers."""

ANSWER_SECONDS = 30.0
"""How long a peer may leave such a question unanswered before it counts as lost."""

SHUTDOWN_SECONDS = 20.0
"""How long the last handshake of a world may take once every rank has reached it."""

_NUM_WORKER_THREADS = 256
"""Calls inside an autograd context hold a thread of the agent's until their own calls are answered:
so many can be under way on a worker at once. An idle thread costs next to nothing."""


class PeerLost(ConnectionError):
    """Another process of the world died, froze or cannot be reached."""


@contextlib.contextmanager
def bound_to_loopback() -> Iterator[None]:
    """While open, sockets of RPC and Gloo bind to loopback, if the world is on one node.

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


def _meeting_rendezvous(url: str, **_: Any) -> Iterator[tuple[dist.Store, int, int]]:
    info = get_world_info()
    yield meet("rpc", _meeting_seconds), info.rank, info.world_size


_meeting_seconds = MEETING_TIMEOUT
with contextlib.suppress(RuntimeError):  # registered already when the module is loaded anew
    dist.register_rendezvous_handler("metadist", _meeting_rendezvous)


def rpc_is_initialized() -> bool:
    """Whether this process is in an RPC world at the moment."""
    return bool(rpc._is_current_rpc_agent_set())


def init_rpc(
    worker_name_format: WorkerNameFormat = default_worker_name_format,
    *,
    rpc_backend_options: rpc.TensorPipeRpcBackendOptions | None = None,
    meeting_timeout: float = MEETING_TIMEOUT,
) -> None:
    """Open the RPC world. Every rank calls it; it returns when all ranks have come.

    It can be called again after `shutdown_rpc`, also when some ranks failed in between.

    Args:
        worker_name_format: makes a worker's name from its place in the world.
        rpc_backend_options: TensorPipe's options, with `device_maps` for instance. Default: on
            the CPU, calls time out after `CALL_TIMEOUT` seconds.
        meeting_timeout: seconds that ranks may arrive apart.

    Raises:
        TimeoutError: not every rank came.
        RuntimeError: RPC is already initialized in this process.
    """
    global _meeting_seconds
    if rpc_is_initialized():
        raise RuntimeError("RPC is already initialized in this process: shut it down first.")
    info = get_world_info()
    options = rpc_backend_options or rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=_NUM_WORKER_THREADS,
        rpc_timeout=CALL_TIMEOUT,
        # The shared-memory transport keeps a thread a process spinning, on cores that the
        # workers compute on.
        _transports=["uv"],
    )
    options.init_method = "metadist://"
    _meeting_seconds = meeting_timeout
    # Counters that torch keeps in the process and that ranks with different pasts disagree on;
    # the meeting's fresh key space makes them needless.
    rpc._init_counter = 0
    rpc.api._all_gather_sequence_id.clear()
    _Arrivals.reset()
    with bound_to_loopback(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="You are using a Backend")  # torch's own use
        rpc.init_rpc(
            worker_name_format(*info),
            rank=info.rank,
            world_size=info.world_size,
            rpc_backend_options=options,
        )


def shutdown_rpc(graceful: bool = True) -> None:
    """Leave the RPC world; without one, do nothing.

    Args:
        graceful: wait until every rank has called it, for as long as they live: a rank that dies
            or stops answering raises. With False, leave at once, as after an error.

    Raises:
        PeerLost: graceful, and a rank died or stopped answering.
    """
    if not rpc_is_initialized():
        return
    try:
        if graceful:
            _wait_for("shutdown", worker_names(), timeout=None)
            rpc.shutdown(graceful=True, timeout=SHUTDOWN_SECONDS)
    except RuntimeError as error:
        raise PeerLost(f"the world could not be ended together: {error}") from None
    finally:
        if rpc_is_initialized():
            rpc.shutdown(graceful=False)


def auto_init_rpc(
    worker_init_fn: Callable[[], None] | None = None,
    worker_name_format: WorkerNameFormat = default_worker_name_format,
    *,
    rpc_backend_options: rpc.TensorPipeRpcBackendOptions | None = None,
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorator for a program's main function: an RPC world around each call of it.

    All ranks run the function; those that finish early serve the others' calls until all have
    finished. When the function raises, this rank leaves the world at once and the error goes on.

    Args:
        worker_init_fn: called on every rank when the world is open, before the function.
        worker_name_format: (world_rank, world_size, local_rank, local_world_size) -> name.
        rpc_backend_options: options of the TensorPipe backend, `device_maps` among them.
    """
    if worker_init_fn is not None and not callable(worker_init_fn):
        raise TypeError("auto_init_rpc takes a worker_init_fn: write @auto_init_rpc() without one.")

    def decorate(function: Callable[P, T] | None = None) -> Callable[P, T]:
        if function is None:  # the main function itself was taken for worker_init_fn
            raise TypeError("auto_init_rpc takes options first: write @auto_init_rpc().")

        @functools.wraps(function)
        def in_world(*args: P.args, **kwargs: P.kwargs) -> T:
            init_rpc(worker_name_format, rpc_backend_options=rpc_backend_options)
            try:
                if worker_init_fn is not None:
                    worker_init_fn()
                result = function(*args, **kwargs)
            except BaseException:
                shutdown_rpc(graceful=False)
                raise
            shutdown_rpc()
            return result

        return in_world

    return decorate


def worker_names() -> list[str]:
    """The names of all workers, in the order of their ranks."""
    agent = rpc.api._get_current_rpc_agent()
    return [info.name for info in sorted(agent.get_worker_infos(), key=lambda info: info.id)]


def has_device_maps() -> bool:
    """Whether the world was opened with device maps, so that GPU tensors may cross as they are."""
    return bool(rpc.api._get_current_rpc_agent()._get_backend_options().device_maps)


def get_worker_id(id: str | int | None = None) -> int:
    """The number of a worker: its rank.

    Args:
        id: a worker's name or number; None for this process.

    Raises:
        UserError: there is no such worker.
    """
    if id is None:
        return get_world_info().rank
    size = get_world_info().world_size
    if isinstance(id, int):
        if not 0 <= id < size:
            raise UserError(f"there is no worker {id} in a world of {size}: take 0 to {size - 1}.")
        return id
    if rpc_is_initialized():
        names = worker_names()
    else:
        names = [default_worker_name_format(rank, size, 0, 1) for rank in range(size)]
    if id not in names:
        raise UserError(f"there is no worker named {id!r}: the world has {', '.join(names)}.")
    return names.index(id)


# --- barrier ---------------------------------------------------------------------------------


class _Arrivals:
    """On a barrier's leader: who has come so far, and whom to tell when all have."""

    lock = threading.Lock()
    waiting: ClassVar[dict[str, dict[str, Any]]] = {}
    counts: ClassVar[dict[str, int]] = {}

    @classmethod
    def reset(cls) -> None:
        with cls.lock:
            cls.waiting.clear()
            cls.counts.clear()

    @classmethod
    def next_key(cls, topic: str, names: list[str]) -> str:
        group = ",".join([topic, *names])
        with cls.lock:
            cls.counts[group] = cls.counts.get(group, 0) + 1
            return f"{group}#{cls.counts[group]}"

    @classmethod
    def missing(cls, key: str, names: list[str]) -> list[str]:
        with cls.lock:
            return [name for name in names if name not in cls.waiting.get(key, {})]


@rpc.functions.async_execution
def _arrive(key: str, name: str, names: list[str]) -> Any:
    future: Any = torch.futures.Future()
    with _Arrivals.lock:
        came = _Arrivals.waiting.setdefault(key, {})
        came[name] = future
        complete = _Arrivals.waiting.pop(key) if len(came) == len(names) else {}
    for each in complete.values():
        each.set_result(None)
    return future


def _answer() -> None:
    """What a heartbeat calls."""


def barrier(worker_names: Iterable[str | int] | None = None, timeout: float | None = 60.0) -> None:
    """Wait until all workers, or those named, have come here too.

    Args:
        worker_names: names or numbers of the workers that meet; None for all. A worker that is
            not among them returns at once.
        timeout: seconds to wait for the others; None for as long as they answer heartbeats.

    Raises:
        PeerLost: a worker died, does not answer, or did not come in time; the message names it.
    """
    everyone = _everyone()
    chosen = range(len(everyone)) if worker_names is None else map(get_worker_id, worker_names)
    _wait_for("barrier", [everyone[rank] for rank in sorted(set(chosen))], timeout)


_everyone = worker_names  # `barrier` has a parameter of that name


def _wait_for(topic: str, names: list[str], timeout: float | None) -> None:
    """A barrier of `names`. Barriers of one topic meet in the order in which each worker calls
    them, so that one that failed on some workers leaves those of other topics in step.
    """
    me = worker_names()[get_world_info().rank]
    if me not in names:
        return
    leader = names[0]
    key = _Arrivals.next_key(topic, names)
    arrived = threading.Event()
    future = rpc.rpc_async(leader, _arrive, args=(key, me, names), timeout=timeout or 0)
    future.add_done_callback(lambda _: arrived.set())
    while not arrived.wait(HEARTBEAT_SECONDS):
        absent = _Arrivals.missing(key, names) if me == leader else [leader]
        require_answers([name for name in absent if name != me])
    try:
        future.wait()
    except RuntimeError as error:
        absent = _absent(leader, key, names)
        who = f"{', '.join(absent)} did not come" if absent else f"{leader} left or is too late"
        raise PeerLost(f"{topic} of {', '.join(names)}: {who} ({_first_line(error)}).") from None


def _absent(leader: str, key: str, names: list[str]) -> list[str]:
    """Who has not come to a barrier, as far as its leader can still be asked."""
    with contextlib.suppress(RuntimeError):
        return rpc.rpc_sync(leader, _Arrivals.missing, args=(key, names), timeout=HEARTBEAT_SECONDS)
    return []


def require_answers(names: list[str]) -> None:
    """Ask workers whether they are there; raises `PeerLost` for one that does not answer."""
    questions = [(name, rpc.rpc_async(name, _answer, timeout=ANSWER_SECONDS)) for name in names]
    for name, question in questions:
        try:
            question.wait()
        except RuntimeError as error:
            raise PeerLost(f"{name} does not answer any more ({_first_line(error)}).") from None


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
