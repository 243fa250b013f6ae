"""The RPC world: opening a world and ending it.

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
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch.distributed as dist
from torch.distributed import rpc

from metadist.distributed import workers
from metadist.distributed.backend_options import backend_options
from metadist.distributed.barriers import Arrivals, wait_for
from metadist.distributed.lost import PeerLost
from metadist.distributed.meeting import MEETING_TIMEOUT, meet
from metadist.distributed.workers import rpc_is_initialized, set_patience, worker_names
from metadist.distributed.world import (
    WorkerNameFormat,
    default_worker_name_format,
    get_world_info,
    is_single_node,
)
from metadist.errors import UserError

P = ParamSpec("P")
T = TypeVar("T")

SHUTDOWN_SECONDS = 20.0
"""How long the last handshake of a world may take once every rank has reached it."""

LEAVE_SECONDS = 3.0
"""How long leaving after an error may take: a call that is stuck in user code is not waited for."""


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


def init_rpc(
    worker_name_format: WorkerNameFormat = default_worker_name_format,
    *,
    rpc_backend_options: rpc.TensorPipeRpcBackendOptions | None = None,
    meeting_timeout: float = MEETING_TIMEOUT,
    answer_timeout: float | None = None,
) -> None:
    """Open the RPC world. Every rank calls it; it returns when all ranks have come.

    It can be called again after `shutdown_rpc`, also when some ranks failed in between.

    Args:
        worker_name_format: makes a worker's name from its place in the world.
        rpc_backend_options: TensorPipe's options, which are copied; see `backend_options` for
            what holds where they say nothing. With `device_maps` tensors cross from GPU to GPU;
            without, they cross, and come back, on the CPU.
        meeting_timeout: seconds that ranks may arrive apart.
        answer_timeout: seconds that a worker may leave a heartbeat unanswered before it counts
            as lost. Default: `ANSWER_SECONDS`. How long a call takes is another matter.

    Raises:
        NeverCame: not every rank came; a `PeerLost` and a `TimeoutError`.
        RuntimeError: RPC is already initialized in this process.
        UserError: device maps that name a worker or a device that is not there.
    """
    global _meeting_seconds
    if rpc_is_initialized():
        raise RuntimeError("RPC is already initialized in this process: shut it down first.")
    info = get_world_info()
    _meeting_seconds = meeting_timeout
    # Counters that torch keeps in the process and that ranks with different pasts disagree on;
    # the meeting's fresh key space makes them needless.
    rpc._init_counter = 0
    rpc.api._all_gather_sequence_id.clear()
    Arrivals.reset()
    set_patience(workers.ANSWER_SECONDS if answer_timeout is None else answer_timeout)
    with bound_to_loopback(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="You are using a Backend")  # torch's own use
        try:
            rpc.init_rpc(
                worker_name_format(*info),
                rank=info.rank,
                world_size=info.world_size,
                rpc_backend_options=backend_options(rpc_backend_options),
            )
        except ValueError as error:  # found by all ranks together
            reason = "; ".join(str(error).splitlines())
            raise UserError(
                f"the device_maps or devices of rpc_backend_options do not fit: {reason}."
            ) from None


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
            wait_for("shutdown", worker_names(), timeout=None)
            rpc.shutdown(graceful=True, timeout=SHUTDOWN_SECONDS)
    except RuntimeError as error:
        raise PeerLost(f"the world could not be ended together: {error}") from None
    finally:
        if rpc_is_initialized():
            leaving = threading.Thread(target=_leave, name="metadist-leave", daemon=True)
            leaving.start()
            leaving.join(LEAVE_SECONDS)


def _leave() -> None:
    """Leave at once; the agent would wait here until calls that run in this process return."""
    with contextlib.suppress(RuntimeError):
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
