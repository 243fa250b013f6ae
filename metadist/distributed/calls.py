"""MapReduce over the workers: partition the arguments, call the function, reduce the results."""

import numbers
import pickle
import threading
from collections.abc import Callable
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, Literal, cast

import optree
import torch
from torch.futures import Future

from metadist.distributed.modules import module_clone, unpicklable_part
from metadist.distributed.partitioners import (
    Partitioner,
    Reducer,
    Shard,
    ShardResults,
    WorkerID,
    as_shards,
    batch_partitioner,
    with_plain_lists,
)
from metadist.distributed.reducers import LinearReducer
from metadist.distributed.requests import FANOUT, Requests
from metadist.distributed.responses import WorkerResponse, attach_gradients, attach_summed_gradients
from metadist.distributed.transport import current_transport, get_worker_id
from metadist.distributed.worker_request import WorkerRequest
from metadist.errors import UserError, first_line
from metadist.gradients import tensors_of
from metadist.profile_ranges import profile_range

if TYPE_CHECKING:
    from metadist.distributed.autograd import CallRecord

GradientMode = Literal["dist_autograd", "worker"]

_WORKER = numbers.Integral | str


def remote_async_call(
    func: Callable[..., Any],
    *,
    args: tuple[Any, ...] | None = None,
    kwargs: dict[str, Any] | None = None,
    partitioner: Partitioner | WorkerID | None = None,
    reducer: Reducer | None = None,
    timeout: float | None = None,
    gradient: GradientMode = "dist_autograd",
    fanout: int = FANOUT,
) -> Future:
    """Run `func` on the workers and return a future at once. Any rank may call it.

    Args:
        func: the mapper. It is pickled by reference: use a function at a module's top level.
        args: the positional arguments before partitioning. Tensors must stay unchanged until the
            future completes.
        kwargs: the keyword arguments before partitioning.
        partitioner: a function `(*args, **kwargs) -> [(worker, args, kwargs), …]`, or the rank or
            name of a worker that gets all arguments. Default: `batch_partitioner`. A worker gets
            its shards in one request and runs them in order.
        reducer: a function from the list of results, in the partitioner's order, to the result.
            Default: no reduction; the result is the list, or the single result if `partitioner` is
            a worker's rank or name.
        timeout: seconds until the call fails with TimeoutError. Default: the transport's (300 s
            for RPC); 0 or more than 2,000,000 waits while the workers answer pings.
        gradient: the place where gradients are computed. "dist_autograd" records a graph across
            the workers for `autograd.backward` inside `autograd.context()`; outside a context the
            result does not require grad. "worker" makes each worker return values and gradients in
            one RPC, with one shard's graph at a time; the result then supports `loss.backward()`.
            It requires one scalar loss in each result and computes first-order gradients only.
            Gradients are computed for tensors and modules' parameters, also in containers
            (registered with optree) and dataclasses. Tensors in other objects are constant.
            "dist_autograd" differentiates tensors in any object, but takes no parameters that
            require grad: send `module_clone(model, by="clone")`.
        fanout: the number of other workers that the caller, and each of these workers in turn,
            sends to; see `metadist.distributed.requests`. The caller sends to all workers inside an
            autograd context, and if workers sum their results but get different tensors that
            require grad.

    Returns:
        A future; its `wait()` returns the result or raises `RemoteError` (func raised, or its
        result cannot be pickled), `UserError` (func raised it), `WorkerLostError`, `TimeoutError`,
        or what the reducer raises.

    Raises:
        UserError: the partitioner names a worker that does not exist, `gradient` is unknown,
            `gradient="worker"` or an `nn.Parameter` that requires grad is used inside an autograd
            context, `mean_reducer` gets shards without items only, `fanout` is below 1, or
            `timeout` is negative or NaN. These errors are raised at once, before anything is sent.
        TypeError: `args` is no tuple or list, `timeout` is not a number, `func`, `partitioner` or
            `reducer` is no function, `func` or its arguments cannot be pickled, or the partitioner
            returns something other than triples. Raised at once.
        RuntimeError: RPC is not initialized. Raised at once.
    """
    call = _RemoteCall(func, args, kwargs, partitioner, reducer, timeout, gradient, fanout)
    call.send()
    result: Future = Future()
    grad_enabled = torch.is_grad_enabled()

    def finish() -> None:
        try:
            with torch.set_grad_enabled(grad_enabled):
                value = call.result()
        except Exception as error:
            result.set_exception(error)
        except BaseException as error:  # a future takes no SystemExit
            result.set_exception(RuntimeError(f"the call raised {error!r}"))
        else:
            result.set_result(value)

    # The thread pings workers that do not respond. Each call has its own, so that none is delayed.
    name = f"metadist {getattr(func, '__name__', 'call')}"
    threading.Thread(target=copy_context().run, args=(finish,), name=name, daemon=True).start()
    return result


def remote_sync_call(
    func: Callable[..., Any],
    *,
    args: tuple[Any, ...] | None = None,
    kwargs: dict[str, Any] | None = None,
    partitioner: Partitioner | WorkerID | None = None,
    reducer: Reducer | None = None,
    timeout: float | None = None,
    gradient: GradientMode = "dist_autograd",
    fanout: int = FANOUT,
) -> Any:
    """Run `func` on the workers and return the result.

    See `remote_async_call` for the arguments and errors. Unlike the wait for its future, this wait
    can be interrupted by Ctrl-C, and the reducer runs in this thread, with its autocast and
    inference mode.
    """
    with profile_range("send"):
        call = _RemoteCall(func, args, kwargs, partitioner, reducer, timeout, gradient, fanout)
        call.send()
    return call.result()


def _check_options(args: object, timeout: object, gradient: str, fanout: int) -> None:
    if gradient not in ("dist_autograd", "worker"):
        raise UserError(f'gradient must be "dist_autograd" or "worker", got {gradient!r}.')
    if fanout < 1:
        raise UserError(f"fanout must be at least 1, got {fanout}.")
    if not isinstance(args, tuple | list | None):
        raise TypeError(
            f"args must be a tuple of the arguments, got a {type(args).__name__}: write "
            "args=(value,) for a single one."
        )
    if timeout is not None and not isinstance(timeout, numbers.Real):
        raise TypeError(f"timeout must be a number of seconds or None, got {timeout!r}.")
    if timeout is not None and not cast(float, timeout) >= 0:  # negative, or NaN
        raise UserError(
            f"timeout must not be negative or NaN, got {timeout}: give seconds, or 0 for no limit."
        )


def _check_functions(func: object, partitioner: object, reducer: object) -> None:
    if not callable(func):
        raise TypeError(f"func must be a function, which the workers run, got {func!r}.")
    if not (partitioner is None or callable(partitioner) or isinstance(partitioner, _WORKER)):
        raise TypeError(
            f"partitioner must be a function, or the rank or name of a worker, got {partitioner!r}."
        )
    if reducer is not None and not callable(reducer):
        raise TypeError(
            "reducer must be a function of the list of results, such as metadist.mean_reducer, got "
            f"{reducer!r}."
        )


def _partition(
    partitioner: Partitioner | WorkerID | None, args: tuple, kwargs: dict[str, Any]
) -> list[Shard]:
    if isinstance(partitioner, numbers.Integral):  # NumPy's integers too
        partitioner = int(partitioner)
    if isinstance(partitioner, int | str):
        return [Shard(partitioner, args, kwargs)]
    return as_shards((partitioner or batch_partitioner)(*args, **kwargs))


class _RemoteCall:
    """One call: a request to each worker that has shards, and the reduction of the responses.

    The constructor checks the arguments, splits them and makes the requests.

    Attributes:
        by_worker: whether workers compute gradients, as with `gradient="worker"`.
        single: whether one worker gets all arguments.
        shards: the shards of the call.
        indices: the indices of the shards of each worker, by rank.
        weights: the weight of each shard, if workers sum their shards; else None.
        divisor: the divisor of that sum; None for none.
        record: the entry of the call in this thread's autograd context; None without a context.
        inputs: the tensors with respect to which each worker differentiates, in the order of
            `indices`.
        requests: the requests, in the order of `indices`.
    """

    def __init__(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...] | None,
        kwargs: dict[str, Any] | None,
        partitioner: Partitioner | WorkerID | None,
        reducer: Reducer | None,
        timeout: float | None,
        gradient: GradientMode,
        fanout: int,
    ) -> None:
        self.func, self.reducer, self.timeout = func, reducer, timeout
        self.transport = current_transport()
        _check_options(args, timeout, gradient, fanout)
        _check_functions(func, partitioner, reducer)
        args, kwargs = with_plain_lists((tuple(args or ()), kwargs or {}))
        if not self.transport.carries_devices:
            args, kwargs = to_cpu((args, kwargs))
        self.by_worker = gradient == "worker" and torch.is_grad_enabled()
        self.single = isinstance(partitioner, _WORKER)
        self.shards = _partition(partitioner, args, kwargs)
        # Unknown workers raise here, before anything is sent.
        self.indices: dict[int, list[int]] = {}
        for index, shard in enumerate(self.shards):
            self.indices.setdefault(self._rank(shard[0]), []).append(index)
        self.weights: list[float] | None = None
        self.divisor: float | None = None
        if isinstance(reducer, LinearReducer) and not self.single:
            sizes = [shard.size for shard in self.shards]
            self.weights, self.divisor = reducer.weights(sizes), reducer.divisor(sizes)
        self.record = self._record_in_context()
        requests: list[tuple[str, WorkerRequest]] = []
        self.inputs: list[list[torch.Tensor]] = []
        for rank, indices in self.indices.items():
            request, inputs = self._request(indices)
            requests.append((self.transport.names[rank], request))
            self.inputs.append(inputs)
        in_tree = self.record is None and (self.weights is None or self._same_inputs())
        self.requests = Requests(requests, fanout if in_tree else None)

    def _record_in_context(self) -> "CallRecord | None":
        """Record the call in this thread's autograd context, if there is one."""
        if not self.transport.records_autograd:
            return None
        from metadist.distributed import autograd  # it needs torch.distributed.autograd

        if not autograd.in_context():
            return None
        if self.by_worker:
            raise UserError(
                'gradient="worker" computes gradients without distributed autograd, whose backward '
                "pass would wait for this call forever: make the call outside of "
                "autograd.context()."
            )
        return autograd.CallRecord([self.func, *(shard[1:] for shard in self.shards)])

    def send(self) -> None:
        """Send the requests, without waiting for the responses."""
        try:
            self.requests.send(self.timeout)
        except Exception as error:
            if self.record is not None and not self.requests.futures:
                self.record.remove()
            if not isinstance(error, pickle.PicklingError):
                raise
            sent: Any = [shard[1:] for shard in self.shards]
            modules = (x for x in optree.tree_leaves(sent) if isinstance(x, torch.nn.Module))
            reason = next(filter(None, map(unpicklable_part, modules)), first_line(error))
            name = getattr(self.func, "__qualname__", type(self.func).__name__)
            raise TypeError(
                f"{name!r} or its arguments cannot be pickled ({reason}): use a function from a "
                "module's top level, and arguments that can be pickled."
            ) from error

    def _rank(self, worker: WorkerID) -> int:
        if type(worker) is int and 0 <= worker < len(self.transport.names):
            return worker
        return get_worker_id(worker)

    def _request(self, indices: list[int]) -> tuple[WorkerRequest, list[torch.Tensor]]:
        """The request for some shards, and the tensors with respect to which the worker
        differentiates.
        """
        calls = [(self.shards[index][1], self.shards[index][2]) for index in indices]
        grad_indices = None
        inputs: list[torch.Tensor] = []
        if self.by_worker:
            tensors = tensors_of(calls)
            grad_indices = [i for i, tensor in enumerate(tensors) if tensor.requires_grad]
            inputs = [tensors[index] for index in grad_indices]
        request = WorkerRequest(
            self.func,
            calls,
            None if self.weights is None else [self.weights[index] for index in indices],
            grad_indices,
            anchor=None if self.record is None else self.record.anchor,
            keep_device=self.transport.carries_devices,
        )
        return request, inputs

    def _same_inputs(self) -> bool:
        """Whether all requests differentiate with respect to the same inputs, so that workers can
        add up the responses of other workers.
        """
        return len({tuple(map(id, inputs)) for inputs in self.inputs}) <= 1

    def result(self) -> Any:
        """Wait for all responses and return the reduced result, or raise the first error."""
        with profile_range("wait"):
            responses = self.requests.wait()
        with profile_range("reduce"):
            return self._reduce(responses)

    def _reduce(self, by_worker: list[list[WorkerResponse]]) -> Any:
        if self.record is not None:
            self.record.complete(by_worker)
        if self.weights is not None and by_worker:
            sums = [responses[0] for responses in by_worker]
            return attach_summed_gradients(sums, self.inputs[: len(sums)], self.divisor)
        values: list[Any] = [None] * len(self.shards)
        for indices, responses, inputs in zip(
            self.indices.values(), by_worker, self.inputs, strict=True
        ):
            for index, response in zip(indices, responses, strict=True):
                values[index] = attach_gradients(response, inputs)
        if self.single and self.reducer is None:
            return values[0]
        results = ShardResults(values, [shard.size for shard in self.shards])
        return results if self.reducer is None else self.reducer(results)


def to_cpu(tree: Any) -> Any:
    """The arguments of a call with tensors and modules on the CPU; RPC sends no others."""

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf if leaf.is_cpu else leaf.cpu()
        if isinstance(leaf, torch.nn.Module):
            tensors = *leaf.parameters(), *leaf.buffers()
            if not all(tensor.is_cpu for tensor in tensors):
                return module_clone(leaf, by="reference", device="cpu")
        return leaf

    return optree.tree_map(move, tree, none_is_leaf=True)
