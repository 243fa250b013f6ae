"""Worker calls over torch.distributed.rpc (TensorPipe).

TensorPipe transfers pickles without authentication, so anyone who can reach its port can run code.
On one node all sockets are therefore bound to the loopback interface; on several nodes, to the
interface that `TP_SOCKET_IFNAME` or `GLOO_SOCKET_IFNAME` names, if one of them is set.
"""

import contextlib
import functools
import logging
import os
import pickle
import re
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import rpc
from torch.distributed.rpc import constants, internal
from torch.futures import Future

from metadist.distributed.errors import WorkerLostError
from metadist.distributed.interfaces import bound_to_interface
from metadist.distributed.process_exit import CLOSE_SECONDS, close_within_seconds
from metadist.distributed.rendezvous import all_gather_object, rendezvous
from metadist.distributed.request_threads import CALL_STILL_RUNS, request_threads
from metadist.distributed.responses import remote_failure
from metadist.distributed.store import RENDEZVOUS_TIMEOUT
from metadist.distributed.transport import (
    MAX_TIMEOUT,
    PING_TIMEOUT,
    Request,
    open_transport,
    rpc_is_initialized,
    shutdown_rpc,
)
from metadist.distributed.world import (
    WorkerNameFormat,
    default_worker_name_format,
    get_world_info,
)
from metadist.errors import UserError, first_line
from metadist.gradients import tensors_of
from metadist.kernels.malloc import use_one_malloc_arena

_log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

CALL_TIMEOUT = 300.0
"""Seconds that a remote call may take, unless the call or the backend options set a timeout."""

NUM_WORKER_THREADS = 256
"""The number of the agent's threads. A request inside an autograd context occupies a thread until
its own calls have returned, so at most this many can run on a worker at once. An idle thread costs
next to nothing."""

SHUTDOWN_SECONDS = 20.0
"""Seconds that torch's shutdown handshake may take once every rank has reached it. A graceful
shutdown takes at most `CLOSE_SECONDS` more."""


def backend_options(
    options: rpc.TensorPipeRpcBackendOptions | None = None,
) -> rpc.TensorPipeRpcBackendOptions:
    """Copy the user's backend options, with metadist's defaults.

    Args:
        options: the user's options. Device maps and devices are kept, as are the number of threads
            and the timeout if they differ from torch's defaults (16 and 60 s). The rendezvous and
            the transports are replaced.
    """
    user_options = options or rpc.TensorPipeRpcBackendOptions()
    threads, timeout = user_options.num_worker_threads, user_options.rpc_timeout
    device_maps: Any = user_options.device_maps
    devices: Any = user_options.devices
    return rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=(
            NUM_WORKER_THREADS if threads == constants.DEFAULT_NUM_WORKER_THREADS else threads
        ),
        rpc_timeout=(
            CALL_TIMEOUT
            if timeout == constants.DEFAULT_RPC_TIMEOUT_SEC
            else min(timeout, MAX_TIMEOUT)
        ),
        init_method="metadist://",
        device_maps=device_maps,
        devices=devices,
        # The shared-memory transport has a spinning thread per process. The channel with several
        # sockets per worker needs 112 more descriptors and 16 more threads per process.
        _transports=["uv"],
        _channels=None if device_maps else ["cma", "basic"],
    )


def _check_names(names: list[Any]) -> None:
    """Check the names of all ranks, on every rank; torch's own errors do not name the problem.

    Raises:
        UserError: torch does not accept a name, or several workers have the same one.
    """
    invalid = [name for name in names if not (isinstance(name, str) and _NAME.fullmatch(name))]
    duplicates = [name for name in names if names.count(name) > 1]
    if invalid or duplicates:
        raise UserError(
            f"worker_name_format gave the name {(invalid or duplicates)[0]!r}"
            f"{'' if invalid else ' to several workers'}: give each worker another name of "
            "letters, digits, '-', '_' and ':', shorter than 128 characters."
        )


_NAME = re.compile(r"[A-Za-z0-9\-_:]{1,127}")


@contextlib.contextmanager
def _started_threads(count: int) -> Iterator[int]:
    """Start idle threads for the block; yields the number of those that cannot be started.

    TensorPipe's agent waits for ever if it cannot start one of its threads.
    """
    end = threading.Event()
    started: list[threading.Thread] = []
    try:
        with contextlib.suppress(RuntimeError):
            while len(started) < count:
                thread = threading.Thread(target=end.wait, daemon=True)
                thread.start()
                started.append(thread)
        yield count - len(started)
    finally:
        end.set()
        for thread in started:
            thread.join()


class RpcTransport:
    """A `Transport` over torch.distributed.rpc.

    Args:
        options: TensorPipe's options; see `backend_options`. With `device_maps`, tensors are
            transferred from GPU to GPU; without them, they are sent and returned on the CPU.
        worker_name_format: the function that makes a worker's name from its ranks.
        rendezvous_timeout: seconds to wait for all ranks to arrive.
        ping_timeout: seconds after which a worker that does not answer a ping is lost.
    """

    records_autograd = True

    def __init__(
        self,
        options: rpc.TensorPipeRpcBackendOptions | None = None,
        worker_name_format: WorkerNameFormat = default_worker_name_format,
        rendezvous_timeout: float = RENDEZVOUS_TIMEOUT,
        ping_timeout: float = PING_TIMEOUT,
    ) -> None:
        self.options = backend_options(options)
        self.worker_name_format = worker_name_format
        self.rendezvous_timeout = rendezvous_timeout
        self.ping_timeout = ping_timeout
        self.timeout = self.options.rpc_timeout
        self.carries_devices = bool(self.options.device_maps)
        self.names: list[str] = []
        self.store: dist.Store = dist.HashStore()

    def open(self) -> None:
        """See `Transport.open`."""
        global _agent_store, _rank
        info, timeout = get_world_info(), self.rendezvous_timeout
        self.store = rendezvous("rpc", timeout)
        use_one_malloc_arena()
        name, threads = self.worker_name_format(*info), self.options.num_worker_threads
        with _started_threads(threads) as missing:  # until all ranks of a node have theirs
            message = [name, missing, _rank in (None, info.rank)]
            gathered = all_gather_object(self.store, "name", message, timeout)
        self.names = [each for each, *_ in gathered]
        _check_names(self.names)
        if others := [rank for rank, (*_, fits) in enumerate(gathered) if not fits]:
            raise UserError(
                f"the processes of ranks {others} had other ranks when they used RPC before, and "
                "torch keeps the first one: start the ranks in new processes, not by fork."
            )
        if any(missing for _, missing, _ in gathered):
            raise UserError(
                f"RPC needs {threads} threads in each rank, which this system does not allow: "
                "raise the limit of processes (`ulimit -u`, or the pids of a container) or of "
                "memory (`ulimit -v`), or choose strategy=allreduce."
            )
        _rank = info.rank
        _agent_store = dist.PrefixStore("agent", self.store)
        # torch's counters in this process differ between ranks after a restart. Under a fresh
        # prefix they are not needed.
        rpc._init_counter = 0
        rpc.api._all_gather_sequence_id.clear()
        with bound_to_interface(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="You are using a Backend")  # torch's own use
            try:
                rpc.init_rpc(
                    name,
                    rank=info.rank,
                    world_size=info.world_size,
                    rpc_backend_options=self.options,
                )
            except ValueError as error:  # raised on all ranks
                if os.environ.get("TORCH_DISTRIBUTED_DEBUG") == "DETAIL":
                    raise UserError(
                        "RPC of torch does not start with TORCH_DISTRIBUTED_DEBUG=DETAIL "
                        f"({error}): set it to INFO."
                    ) from None
                if not (self.options.device_maps or self.options.devices):
                    raise
                reason = "; ".join(str(error).splitlines())
                raise UserError(
                    f"the device_maps or devices of rpc_backend_options do not fit: {reason}."
                ) from None

    def close(self, graceful: bool) -> None:
        """See `Transport.close`."""
        stuck = False  # the agent waits in `rpc.shutdown` for calls that run on its own threads
        try:
            if graceful:
                shutdown = functools.partial(rpc.shutdown, timeout=SHUTDOWN_SECONDS)
                call = close_within_seconds(shutdown, SHUTDOWN_SECONDS + CLOSE_SECONDS)
                stuck = not call.done()
                if stuck:
                    _log.warning(CALL_STILL_RUNS)
                else:
                    call.result()
        except RuntimeError as error:
            raise WorkerLostError(
                f"RPC did not shut down on all ranks: {first_line(error)}"
            ) from None
        finally:
            if not stuck and rpc._is_current_rpc_agent_set():
                close_within_seconds(functools.partial(rpc.shutdown, graceful=False))

    def send(self, worker: str, request: Request, timeout: float | None) -> Future:
        """See `Transport.send`."""
        if worker == self._own_name and request.anchor is None and not self.carries_devices:
            return self._respond_here(request)
        seconds = _limit(self.timeout if timeout is None else timeout)
        # Torch records a response only if gradients are enabled here, and otherwise waits for it.
        recorded = request.anchor is not None
        with _pickling_errors(), torch.inference_mode(False) if recorded else nullcontext():
            return rpc.rpc_async(worker, _respond, args=(request,), timeout=seconds)

    @property
    def _own_name(self) -> str:
        return self.names[get_world_info().rank]

    def _respond_here(self, request: Request) -> Future:
        """A future of the response to a request to this process: copied as by RPC, but not sent."""
        with _pickling_errors():
            pickled, tensors = _pickled(request)
        future: Future = Future()

        def respond() -> None:
            try:
                response = _synchronized_response(_unpickled(pickled, tensors))
                future.set_result(_unpickled(*_pickled(response)))
            except Exception as error:  # the request or the response cannot be pickled
                future.set_exception(error)
            except BaseException as error:  # a future takes no SystemExit
                future.set_exception(RuntimeError(repr(error)))

        request_threads.submit(respond, own=True)
        return future

    def ping(self, worker: str) -> Future:
        """See `Transport.ping`."""
        return rpc.rpc_async(worker, _answer_ping, timeout=_limit(self.ping_timeout))

    def is_timeout(self, error: Exception) -> bool:
        """See `Transport.is_timeout`."""
        return "RPCErr:1:" in str(error)


def _reduce_tensor(tensor: Tensor) -> tuple:
    """The pickle of a tensor. If it has no elements and an offset in its storage, it is copied,
    since torch 2.14 aborts the process that receives such a view.
    """
    if not tensor.numel() and tensor.storage_offset():
        tensor = tensor.clone()
    return internal._internal_rpc_pickler._tensor_reducer(tensor)


internal._internal_rpc_pickler._register_reducer(Tensor, _reduce_tensor)  # for all messages


def _pickled(content: Any) -> tuple[bytes, list[Tensor]]:
    """An object, pickled as by RPC, and copies of its tensors."""
    pickled, tensors = internal.serialize(content)
    with torch.inference_mode(False):  # in which tensors have no gradient
        copies = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
    return pickled, copies


@contextlib.contextmanager
def _pickling_errors() -> Iterator[None]:
    """Raise every exception of RPC's pickler, such as those of the user's `__reduce__`, as a
    `PicklingError`, and any other exception as it is.
    """
    try:
        yield
    except Exception as error:
        files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
        if internal.__file__ not in files:
            raise
        raise pickle.PicklingError(first_line(error)) from error


def _unpickled(pickled: bytes, tensors: list[Tensor]) -> Any:
    content = internal.deserialize(pickled, tensors)
    if isinstance(content, AttributeError):  # RPC returns it instead of raising it
        raise content
    return content


def _limit(seconds: float) -> float:
    """A timeout that TensorPipe can count, at least 1 ms; 0 for no limit if it is too long."""
    return max(seconds, 0.001) if 0 < seconds <= MAX_TIMEOUT else 0


_agent_store: dist.Store = dist.HashStore()
_rank: int | None = None
"""The rank with which this process, or the one that it was forked from, has used RPC."""


def _rendezvous_handler(url: str, **_: Any) -> Iterator[tuple[dist.Store, int, int]]:
    info = get_world_info()
    yield _agent_store, info.rank, info.world_size


with contextlib.suppress(RuntimeError):  # already registered, if this module is reloaded
    dist.register_rendezvous_handler("metadist", _rendezvous_handler)


def _answer_ping() -> None:
    """The remote function of a ping."""


@rpc.functions.async_execution  # type: ignore[untyped-decorator]  # torch has no types for it
def _respond(request: Request) -> Future:
    """The remote function of a call; it returns a future of the response.

    In a distributed autograd context, the request runs on the agent's thread that received it,
    because the context belongs to that thread.
    """
    future: Future = Future()
    if request.anchor is not None:
        future.set_result(_synchronized_response(request))
    else:
        request_threads.submit(lambda: future.set_result(_synchronized_response(request)))
    return future


def _synchronized_response(request: Request) -> Any:
    """The response, with complete GPU tensors: a future without devices records no CUDA events."""
    try:
        response = request.respond()
        if request.keep_device:
            for device in {tensor.device for tensor in tensors_of(response) if tensor.is_cuda}:
                torch.cuda.synchronize(device)
    except BaseException as error:  # the caller would wait for the response
        return remote_failure(error)
    return response


def init_rpc(
    worker_name_format: WorkerNameFormat = default_worker_name_format,
    *,
    rpc_backend_options: rpc.TensorPipeRpcBackendOptions | None = None,
    rendezvous_timeout: float = RENDEZVOUS_TIMEOUT,
    ping_timeout: float = PING_TIMEOUT,
) -> None:
    """Initialize RPC. Every rank calls it; it returns when all ranks have called it.

    It can be called again after `shutdown_rpc`, even if some ranks failed in between.

    Args:
        worker_name_format: (world_rank, world_size, local_rank, local_world_size) -> name.
        rpc_backend_options: TensorPipe's options, which are copied; see `RpcTransport`.
        rendezvous_timeout: seconds to wait for all ranks to arrive.
        ping_timeout: seconds after which a worker that does not answer a ping is lost. It does
            not limit the time that a call takes.

    Raises:
        RendezvousTimeoutError: some ranks did not arrive.
        RuntimeError: RPC is already initialized in this process.
        UserError: a worker's name is invalid or not unique, the device maps or devices do not fit,
            the system does not allow enough threads, this process had another rank when it used
            RPC before, or TORCH_DISTRIBUTED_DEBUG is DETAIL.
    """
    if rpc_is_initialized() or rpc._is_current_rpc_agent_set():
        raise RuntimeError("RPC is already initialized in this process: shut it down first.")
    transport = RpcTransport(
        rpc_backend_options, worker_name_format, rendezvous_timeout, ping_timeout
    )
    open_transport(transport, worker_name_format)


def auto_init_rpc(
    worker_init_fn: Callable[[], None] | None = None,
    worker_name_format: WorkerNameFormat = default_worker_name_format,
    *,
    rpc_backend_options: rpc.TensorPipeRpcBackendOptions | None = None,
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorator for a program's main function: RPC is initialized around each call of it.

    All ranks run the function; those that finish early serve the others' calls until all have
    finished. When the function raises, this rank leaves at once and the exception propagates;
    `sys.exit()` without an error status counts as a return.

    Args:
        worker_init_fn: a function called on every rank after initialization, before the main
            function.
        worker_name_format: (world_rank, world_size, local_rank, local_world_size) -> name.
        rpc_backend_options: TensorPipe's options, such as `device_maps`; see `RpcTransport`.

    Raises:
        TypeError: it is written without brackets, or `worker_init_fn` is not a function.
    """
    if worker_init_fn is not None and not callable(worker_init_fn):
        raise TypeError("auto_init_rpc takes a worker_init_fn: write @auto_init_rpc() without one.")

    def decorate(function: Callable[P, T] | None = None) -> Callable[P, T]:
        if function is None:  # the main function itself was passed as worker_init_fn
            raise TypeError("auto_init_rpc takes options first: write @auto_init_rpc().")

        @functools.wraps(function)
        def with_rpc(*args: P.args, **kwargs: P.kwargs) -> T:
            init_rpc(worker_name_format, rpc_backend_options=rpc_backend_options)
            try:
                if worker_init_fn is not None:
                    worker_init_fn()
                result = function(*args, **kwargs)
            except BaseException as error:
                shutdown_rpc(graceful=isinstance(error, SystemExit) and not error.code)
                raise
            shutdown_rpc()
            return result

        return with_rpc

    return decorate
