"""MapReduce over the workers: partition the arguments, call, reduce the results."""

import pickle
import queue
from collections.abc import Callable
from typing import Any, Literal

import optree
import torch
from torch.distributed import autograd as dist_autograd
from torch.distributed import rpc
from torch.futures import Future

from metadist.distributed import autograd
from metadist.distributed.lost import PeerLost
from metadist.distributed.modules import module_clone
from metadist.distributed.one_visit import attach, attach_sum
from metadist.distributed.partitioners import batch_partitioner
from metadist.distributed.phases import phase
from metadist.distributed.receiving import receive
from metadist.distributed.reducers import LinearReducer
from metadist.distributed.shards import (
    Partitioner,
    Reducer,
    Shard,
    ShardResults,
    WorkerID,
    as_shards,
)
from metadist.distributed.visits import Answer, Failure, Visit, tensors_of
from metadist.distributed.workers import (
    HEARTBEAT_SECONDS,
    get_worker_id,
    has_device_maps,
    place_of,
    require_answers,
    rpc_is_initialized,
    worker_names,
)
from metadist.distributed.world import get_rank
from metadist.errors import UserError

GradientMode = Literal["context", "visit"]


class RemoteError(RuntimeError):
    """A function raised on another worker.

    Attributes:
        worker: the worker's name.
        remote_traceback: the traceback there, as text.
    """

    def __init__(self, worker: str, failure: Failure) -> None:
        super().__init__(
            f"{worker}{failure.where} raised {failure.kind}: {failure.message}\n"
            f"--- traceback on {worker} ---\n{failure.traceback.rstrip()}"
        )
        self.worker = worker
        self.remote_traceback = failure.traceback
        self._failure = failure

    def __reduce__(self) -> tuple:
        return RemoteError, (self.worker, self._failure)


def remote_async_call(
    func: Callable[..., Any],
    *,
    args: tuple | None = None,
    kwargs: dict[str, Any] | None = None,
    partitioner: Partitioner | WorkerID | None = None,
    reducer: Reducer | None = None,
    timeout: float | None = None,
    gradient: GradientMode = "context",
) -> Future:
    """Run `func` on the workers and return at once. Any rank of an RPC world may call it.

    Args:
        func: the mapper. Pickled by reference: a function at a module's top level.
        args: positional arguments before partitioning.
        kwargs: keyword arguments before partitioning.
        partitioner: who gets what: a worker's number or name (all arguments go there), or a
            function `(*args, **kwargs) -> [(worker, args, kwargs), …]`. Default:
            `batch_partitioner`. A worker's shards travel together and run in order.
        reducer: a function from the list of results, in the partitioner's order, to the result.
            Default: none, the list itself (for a worker's number or name: the one result).
        timeout: seconds until the call fails with TimeoutError. Default: the world's
            (300, see `backend_options`); 0 waits for as long as the workers answer heartbeats.
        gradient: where derivatives are taken. "context" records a graph across the workers for
            `autograd.backward` inside `autograd.context()`; outside of one the result has no
            derivative. "visit" makes each worker compute values and derivatives in the same
            visit, one shard's graph at a time; the result then works with plain
            `loss.backward()`. It holds for one scalar loss in each result and first derivatives.

    Returns:
        A future; its `wait()` returns the result or raises `RemoteError` (func raised),
        `PeerLost` (a worker died), `TimeoutError`, or what the reducer raises.

    Raises:
        UserError: at once, before anything is sent: the partitioner names a worker that is not
            there, or an unknown `gradient`.
        TypeError: at once: `func` or its arguments cannot be sent, or the partitioner gives
            something else than triples.
        RuntimeError: at once: there is no RPC world.
    """
    call = _Call(func, args or (), kwargs or {}, partitioner, reducer, timeout, gradient)
    result: Future = Future()

    def finish(_: Future) -> None:
        try:
            value = call.result()
        except BaseException as error:
            result.set_exception(error)
        else:
            result.set_result(value)

    if call.futures:
        torch.futures.collect_all(call.futures).add_done_callback(finish)
    else:
        finish(result)
    return result


def remote_sync_call(
    func: Callable[..., Any],
    *,
    args: tuple | None = None,
    kwargs: dict[str, Any] | None = None,
    partitioner: Partitioner | WorkerID | None = None,
    reducer: Reducer | None = None,
    timeout: float | None = None,
    gradient: GradientMode = "context",
) -> Any:
    """Run `func` on the workers and return the result: `remote_async_call(…).wait()`.

    Arguments and errors are those of `remote_async_call`.
    """
    with phase("send"):
        call = _Call(func, args or (), kwargs or {}, partitioner, reducer, timeout, gradient)
    return call.result()


class _Call:
    """A call under way: one visit a worker, and how their answers become the result."""

    def __init__(
        self,
        func: Callable[..., Any],
        args: tuple,
        kwargs: dict[str, Any],
        partitioner: Partitioner | WorkerID | None,
        reducer: Reducer | None,
        timeout: float | None,
        gradient: GradientMode,
    ) -> None:
        if not rpc_is_initialized():
            raise RuntimeError(
                "there is no RPC world: call this from a function under @auto_init_rpc()."
            )
        if gradient not in ("context", "visit"):
            raise UserError(f'gradient must be "context" or "visit", got {gradient!r}.')
        self.single = partitioner if isinstance(partitioner, int | str) else None
        self.reducer = reducer
        self.linear = isinstance(reducer, LinearReducer) and self.single is None
        self.names = worker_names()
        self.keep_device = has_device_maps()
        if not self.keep_device:
            args, kwargs = _on_cpu((args, kwargs))
        if self.single is not None:
            self.shards = [Shard(self.single, args, kwargs)]
        else:
            self.shards = as_shards((partitioner or batch_partitioner)(*args, **kwargs))
        self.by_visit = gradient == "visit" and torch.is_grad_enabled()
        context_id = None if self.by_visit else _current_context()
        self.note_results = (
            None
            if context_id is None
            else autograd.note_call(context_id, tensors_of((args, kwargs)))
        )
        # Unknown workers are found here, before anything is sent.
        self.places: dict[int, list[int]] = {}
        for place, shard in enumerate(self.shards):
            self.places.setdefault(self._number(shard[0]), []).append(place)
        sizes = [shard.size for shard in self.shards]
        self.weights = reducer.weights(sizes) if self.linear else None
        self.divisor = reducer.divisor(sizes) if self.linear else None
        self.given: list[list[torch.Tensor]] = []
        self.futures = [
            self._send(func, worker, places, timeout) for worker, places in self.places.items()
        ]

    def _number(self, worker: WorkerID) -> int:
        known = type(worker) is int and 0 <= worker < len(self.names)
        return worker if known else get_worker_id(worker)

    def _send(
        self, func: Callable[..., Any], worker: int, places: list[int], timeout: float | None
    ) -> Future:
        calls = [(self.shards[place][1], self.shards[place][2]) for place in places]
        differentiate = None
        given: list[torch.Tensor] = []
        if self.by_visit:
            everything = tensors_of(calls)
            differentiate = [i for i, tensor in enumerate(everything) if tensor.requires_grad]
            given = [everything[i] for i in differentiate]
        self.given.append(given)
        visit = Visit(
            func,
            calls,
            None if self.weights is None else [self.weights[place] for place in places],
            differentiate,
            in_context=self.note_results is not None,
            keep_device=self.keep_device,
            alone=self.single is not None and not self.by_visit,
        )
        extra = {} if timeout is None else {"timeout": timeout}
        try:
            return rpc.rpc_async(self.names[worker], receive, args=(visit,), **extra)
        except (pickle.PicklingError, AttributeError) as error:
            raise TypeError(
                f"{getattr(func, '__qualname__', func)!r} or its arguments cannot be sent to "
                f"another worker ({error}): use a function from a module's top level."
            ) from None

    def result(self) -> Any:
        """Wait for all visits; the reduced result, or the error that came first."""
        with phase("wait"):
            visits = self._visits()
        with phase("reduce"):
            return self._reduced(visits)

    def _reduced(self, visits: list[list[Answer]]) -> Any:
        if self.note_results is not None:
            self.note_results(visits)
        if self.linear and visits:
            return attach_sum([answers[0] for answers in visits], self.given, self.divisor)
        values: list[Any] = [None] * len(self.shards)
        for places, answers, given in zip(self.places.values(), visits, self.given, strict=True):
            for place, answer in zip(places, answers, strict=True):
                values[place] = attach(answer, given)
        if self.single is not None and self.reducer is None:
            return values[0]
        results = ShardResults(values, [shard.size for shard in self.shards])
        return results if self.reducer is None else self.reducer(results)

    def _visits(self) -> list[list[Answer]]:
        """The answers of all visits, in the order of `places`. The first failure ends the wait;
        visits that are still under way then end on their workers, unheard.
        """
        finished: queue.SimpleQueue[int] = queue.SimpleQueue()
        names = [self.names[worker] for worker in self.places]
        for place, future in enumerate(self.futures):
            future.add_done_callback(lambda _, place=place: finished.put(place))
        answers: dict[int, list[Answer]] = {}
        while len(answers) < len(names):
            try:
                place = finished.get(timeout=HEARTBEAT_SECONDS)
            except queue.Empty:
                pending = {name for i, name in enumerate(names) if i not in answers}
                require_answers(sorted(pending - {self.names[get_rank()]}))
                continue
            answers[place] = self._answer(names[place], self.futures[place])
        return [answers[place] for place in range(len(names))]

    def _answer(self, name: str, future: Future) -> list[Answer]:
        try:
            answer = future.wait()
        except RuntimeError as error:
            text = str(error)
            if "RPCErr:1" in text or "timed out" in text.lower():
                raise TimeoutError(f"{place_of(name)} did not answer in time: {text}") from None
            reason = text.splitlines()[0]
            raise PeerLost(f"{place_of(name)} was lost during a call: {reason}") from None
        if isinstance(answer, Failure):
            if answer.of_user:
                raise UserError(answer.message)
            raise RemoteError(name, answer)
        return answer


def _current_context() -> int | None:
    # That there is none, the usual case, is not left to an exception out of C++, which is slow.
    if dist_autograd._get_debug_info()["num_autograd_contexts"] == 0:
        return None
    try:
        return dist_autograd._current_context()._context_id()
    except RuntimeError:
        return None


def _on_cpu(tree: Any) -> Any:
    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf if leaf.is_cpu else leaf.cpu()
        if isinstance(leaf, torch.nn.Module) and any(not p.is_cpu for p in leaf.parameters()):
            return module_clone(leaf, by="reference", device="cpu")
        return leaf

    return optree.tree_map(move, tree, none_is_leaf=True)
