"""Strategies: where a meta-batch is computed, and how its gradients are aggregated.

A strategy splits a batch with the partitioner, runs a mapper `(learner, batch) -> result` on each
shard, and combines the results with the reducer. By default, all strategies give the same bits on
CPUs; see `metadist.distributed.reducers`.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import optree
import torch
from annotated_types import Gt, Le
from torch import Tensor, nn

from metadist import distributed
from metadist.algorithms.functional import parameters_by_name
from metadist.distributed import get_rank, get_worker_id, get_world_size
from metadist.distributed.collectives import (
    all_gather,
    all_reduce,
    broadcast,
    destroy_process_group,
    init_process_group,
)
from metadist.distributed.hierarchy import FLAT_UP_TO
from metadist.distributed.partitioners import Partitioner, WorkerID, as_shards
from metadist.distributed.reducers import LinearReducer, finish_sum
from metadist.distributed.requests import FANOUT
from metadist.distributed.store import RENDEZVOUS_TIMEOUT
from metadist.distributed.transport import MAX_TIMEOUT
from metadist.distributed.worker_request import Call, run_shards
from metadist.errors import UserError
from metadist.profile_ranges import profile_range

if TYPE_CHECKING:
    from metadist.distributed.data_parallel import DataParallel

Mapper = Callable[[Any, Any], Any]
"""(learner, batch) -> result."""

StopRequested = Callable[[], bool]
"""Whether this driver was asked to stop."""


def _never() -> bool:
    return False


_PING_SHARE = 0.8
"""Timeout of a ping as a fraction of `timeout_seconds`, so that lost workers are found in time."""


class Strategy(ABC):
    """Computes meta-batches. Every rank makes one.

    Args:
        partitioner: splits a batch among the workers.
        reducer: combines the shards' results.

    Attributes:
        name: "local", "rpc" or "allreduce"; of a class without one, the name of the class.
        parameter_device: the device of the learner's parameters: "cpu", or "device" for each
            rank's own device.
        every_rank_drives: whether every rank runs the training loop, instead of rank zero alone.
    """

    name: str
    parameter_device: Literal["cpu", "device"] = "device"
    every_rank_drives = True

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if not hasattr(cls, "name"):
            cls.name = cls.__name__

    def __init__(self, partitioner: Partitioner, reducer: Callable[[list], Any]) -> None:
        self.partitioner = partitioner
        self.reducer = reducer

    @abstractmethod
    def open(self) -> None:
        """Join the other ranks. Every rank calls it."""

    @abstractmethod
    def close(self, graceful: bool = True) -> None:
        """Leave. If graceful, every rank calls it, and it returns when all ranks have."""

    @property
    def is_driver(self) -> bool:
        """Whether this rank runs the training loop; other ranks serve requests until `close`."""
        return self.every_rank_drives or get_rank() == 0

    @property
    def sums_on_workers(self) -> bool:
        """Whether each worker sums over its own tasks, which it can batch and compile.

        Otherwise it runs the mapper on one shard after the other, one task at a time.
        """
        return isinstance(self.reducer, LinearReducer)

    @abstractmethod
    def forward_backward(
        self, mapper: Mapper, learner: nn.Module, batch: Any, stop_requested: StopRequested = _never
    ) -> tuple[Any, bool]:
        """Compute the reduced result, and put the gradient of its `loss` into `.grad`.

        The drivers call it. `.grad` is replaced, not accumulated. For a parameter on which no
        task's loss depends, it is None, or zero with distributed autograd and the engine "ddp".

        Args:
            mapper: the function that the workers run.
            learner: the mapper's first argument.
            batch: the mapper's second argument, which is split.
            stop_requested: a function that is called once, after the computation.

        Returns:
            The reduced result, detached, and whether `stop_requested` returned True on any driver.
            Both are the same on all drivers.
        """

    @abstractmethod
    def map_tasks(self, mapper: Mapper, learner: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Compute the mapper's values for all items of the batch, without gradients.

        The drivers call it, and all get the same values.

        Args:
            mapper: the function that the workers run. It returns tensors by name, with a first
                dimension of items.
            learner: the mapper's first argument.
            batch: the mapper's second argument, which is split.

        Returns:
            The tensors of all shards, by name, concatenated in order.
        """

    def any_rank(self, flag: bool) -> bool:
        """Whether the flag is set on any driver. The drivers call it."""
        return flag

    def barrier(self) -> None:  # noqa: B027  # one driver waits for nobody
        """Wait for the other drivers. The drivers call it."""

    def broadcast_module(self, module: nn.Module) -> None:  # noqa: B027  # one driver: no copies
        """Copy rank zero's parameters, with their `requires_grad`, and buffers to the other
        drivers. The drivers call it.
        """

    def check_replicas(self, tensors: Iterable[Tensor], iteration: int) -> None:  # noqa: B027
        """Compare the drivers' copies of some tensors by a digest. The drivers call it.

        Args:
            tensors: the tensors that must be equal, in the same order on every driver.
            iteration: finished outer steps, for the error message.

        Raises:
            UserError: the copies differ. It is raised on all drivers.
        """


class _RankShards(NamedTuple):
    """The shards of a rank.

    A rank without shards of its own computes the first shard with weight zero, so that its part of
    the sum has the right structure and types. The other ranks take as long anyway.

    Attributes:
        indices: indices of the rank's shards among all shards; [] if it has none.
        calls: the mapper's arguments for each shard.
        weights: the weight of each shard in the sum over all ranks.
        divisor: the number by which that sum is divided; None for a sum.
        total: the number of shards of all ranks.
    """

    indices: list[int]
    calls: list[Call]
    weights: list[float]
    divisor: float | None
    total: int


class _PartialSums(NamedTuple):
    """A rank's part of the sums over all ranks, in float64.

    Attributes:
        value: the sum of the mapper's results.
        dtypes: the final types of its leaves.
        trainable: the parameters that require grad.
        gradient: the gradient with respect to each of them; None where no result depends on it.
        divisor: the number by which the sums are divided; None for a sum.
    """

    value: Any
    dtypes: list[torch.dtype | None]
    trainable: list[nn.Parameter]
    gradient: list[Tensor | None]
    divisor: float | None


class _InProcessStrategy(Strategy):
    """Runs this rank's shards in this process."""

    reducer: LinearReducer

    def __init__(self, partitioner: Partitioner, reducer: Callable[[list], Any]) -> None:
        super().__init__(partitioner, reducer)
        if not isinstance(reducer, LinearReducer):
            raise UserError(
                f"strategy={self.name} adds up weighted results, which the reducer "
                f"{type(reducer).__name__} does not: "
                "choose reducer=mean or reducer=sum, or strategy=rpc."
            )

    def _shards_of_rank(self, learner: nn.Module, batch: Any) -> _RankShards:
        shards = as_shards(self.partitioner(learner, batch))
        sizes = [shard.size for shard in shards]
        weights = self.reducer.weights(sizes)
        indices = _indices_of_rank([worker for worker, _, _ in shards])
        return _RankShards(
            indices,
            [(shards[i][1], shards[i][2]) for i in indices or [0]],
            [weights[i] for i in indices] or [0 * weights[0]],
            self.reducer.divisor(sizes),
            len(shards),
        )

    def _partial_sums(self, mapper: Mapper, learner: nn.Module, batch: Any) -> _PartialSums:
        trainable = []
        for parameter in parameters_by_name(learner).values():
            parameter.grad = None  # also of parameters that no longer require grad
            if parameter.requires_grad:
                trainable.append(parameter)
        shards = self._shards_of_rank(learner, batch)
        weights, idle = shards.weights, not any(shards.weights)
        if idle:
            weights = [type(weight)(1) for weight in weights]  # numbers keep their type
        (response,) = run_shards(mapper, shards.calls, weights, trainable)
        value, dtypes = response.value, response.dtypes or []
        gradient: list[Tensor | None] = [None] * len(trainable)
        if response.gradients is not None:
            gradient = list(response.gradients.by_input)
        if idle:  # zero times infinity would not be zero
            value = _zeros_like(value)
            gradient = [None if part is None else torch.zeros_like(part) for part in gradient]
        return _PartialSums(value, dtypes, trainable, gradient, shards.divisor)


class LocalStrategy(_InProcessStrategy):
    """Computes everything in this process.

    See `Strategy` for the arguments.
    """

    name = "local"

    def open(self) -> None:
        """Check that there is one process.

        Raises:
            UserError: there are several processes.
        """
        if get_world_size() > 1:
            raise UserError(
                f"strategy=local runs in one process, but torchrun started {get_world_size()}: "
                "choose strategy=rpc or strategy=allreduce, or start with python, without "
                "launcher=torchrun."
            )

    def close(self, graceful: bool = True) -> None:
        """Does nothing."""

    def forward_backward(
        self, mapper: Mapper, learner: nn.Module, batch: Any, stop_requested: StopRequested = _never
    ) -> tuple[Any, bool]:
        """See `Strategy`."""
        sums = self._partial_sums(mapper, learner, batch)
        _set_gradient(sums.trainable, sums.gradient, sums.divisor)
        return finish_sum(sums.value, sums.divisor, sums.dtypes), stop_requested()

    def map_tasks(self, mapper: Mapper, learner: nn.Module, batch: Any) -> dict[str, Tensor]:
        """See `Strategy`."""
        calls = self._shards_of_rank(learner, batch).calls
        return _concatenated([response.value for response in run_shards(mapper, calls)])


class AllReduceStrategy(_InProcessStrategy):
    """Every rank computes its own shards; an all-reduce sums results and gradients.

    Args:
        partitioner: splits a batch among the ranks.
        reducer: a weighted sum, such as the mean.
        engine: "sum" uses one all-reduce in float64, so that the bits do not depend on the number
            of ranks. "ddp" uses torch's DistributedDataParallel, which exchanges the gradient in
            buckets, in the parameters' own type, during the last shard's backward pass.
        flat_up_to: largest number of ranks for which a sum over Gloo is one collective over all
            ranks. More ranks sum within groups first, then between the groups. A group is a node,
            or about the square root of the number of ranks.
        shared_memory: whether the ranks of a single machine sum in shared memory on CPUs, where
            that is possible, instead of over Gloo.
        rendezvous_timeout_seconds: seconds by which the ranks' starts may differ.
        call_timeout: seconds that a collective waits for the slowest rank. Ranks that died or
            froze are found long before, by the job's heartbeat.
        device: the device of this rank's learner. Default: the GPU of the local rank if there is
            one, else the CPU.
    """

    name = "allreduce"

    def __init__(
        self,
        partitioner: Partitioner,
        reducer: LinearReducer,
        engine: Literal["sum", "ddp"] = "sum",
        flat_up_to: Annotated[int, Gt(0)] = FLAT_UP_TO,
        shared_memory: bool = True,
        rendezvous_timeout_seconds: Annotated[float, Gt(0)] = RENDEZVOUS_TIMEOUT,
        call_timeout: Annotated[float, Gt(0), Le(MAX_TIMEOUT)] = 3600.0,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(partitioner, reducer)
        self.engine = engine
        self.flat_up_to = flat_up_to
        self.shared_memory = shared_memory
        self.rendezvous_timeout_seconds = rendezvous_timeout_seconds
        self.call_timeout = call_timeout
        self.device = device
        self._ddp: DataParallel | None = None
        self._checked: tuple[Mapper, Any] | None = None

    @property
    def sums_on_workers(self) -> bool:
        """True with the engine "sum" only."""
        return self.engine == "sum"

    def open(self) -> None:
        """Open the process group."""
        init_process_group(
            timeout=self.call_timeout,
            rendezvous_timeout=self.rendezvous_timeout_seconds,
            flat_up_to=self.flat_up_to,
            shared_memory=self.shared_memory,
            device=self.device,
        )

    def close(self, graceful: bool = True) -> None:
        """Leave the process group, after the slowest rank when graceful."""
        self._ddp = None
        try:
            if graceful:
                self.barrier()
        except BaseException:
            graceful = False
            raise
        finally:
            destroy_process_group(graceful)

    def forward_backward(
        self, mapper: Mapper, learner: nn.Module, batch: Any, stop_requested: StopRequested = _never
    ) -> tuple[Any, bool]:
        """See `Strategy`. One all-reduce in float64 sums results, gradients and stop requests."""
        if self.engine == "ddp":
            return self._backward_ddp(mapper, learner, batch, stop_requested)
        sums = self._partial_sums(mapper, learner, batch)
        self._check_structure(mapper, sums.value)
        with profile_range("reduce"):
            filled = [
                torch.zeros_like(parameter, dtype=torch.float64) if part is None else part
                for parameter, part in zip(sums.trainable, sums.gradient, strict=True)
            ]
            # Flags in the type and on the device of the gradient, so that one collective suffices.
            flags = (filled or [sums.value.loss])[0].new_tensor(
                [*(part is not None for part in sums.gradient), stop_requested()]
            )
            value, filled, flags = all_reduce((sums.value, filled, flags), check=False)
            *counts, stops = flags.tolist()
            gradient = [g if count else None for g, count in zip(filled, counts, strict=True)]
            _set_gradient(sums.trainable, gradient, sums.divisor)
            return finish_sum(value, sums.divisor, sums.dtypes), stops > 0

    def _backward_ddp(
        self, mapper: Mapper, learner: nn.Module, batch: Any, stop_requested: StopRequested
    ) -> tuple[Any, bool]:
        """Sum gradients by DistributedDataParallel, results and stop requests by an all-reduce."""
        from metadist.distributed.data_parallel import DataParallel

        shards = self._shards_of_rank(learner, batch)
        if self._ddp is None or not self._ddp.matches(learner):
            self._ddp = DataParallel(learner)
        part, dtypes = self._ddp.backward(mapper, shards.calls, shards.weights, shards.divisor)
        self._check_structure(mapper, part)
        with profile_range("reduce"):
            stops = part.loss.new_tensor(float(stop_requested()))
            part, stops = all_reduce((part, stops), check=False)
            return finish_sum(part, shards.divisor, dtypes), bool(stops)

    def _check_structure(self, mapper: Mapper, result: Any) -> None:
        """Require that the results of all ranks, which are summed, have the same structure.

        The first results are compared between ranks, later ones with the first.
        """
        leaves, tree = optree.tree_flatten(result, none_is_leaf=True)
        structure = (tree, [getattr(leaf, "shape", ()) for leaf in leaves])
        if self._checked is None or self._checked[0] is not mapper:
            self._require_equal(str(structure))
            self._checked = mapper, structure
        elif structure != self._checked[1]:
            raise UserError(_different_structure([get_rank()], "the results before"))

    def _require_equal(self, structure: str) -> None:
        """Raise an error on all ranks if the structure of their results differs."""
        different = _ranks_that_differ(structure.encode())
        if different:
            raise UserError(_different_structure(different, "those of rank 0"))

    def map_tasks(self, mapper: Mapper, learner: nn.Module, batch: Any) -> dict[str, Tensor]:
        """See `Strategy`."""
        shards = self._shards_of_rank(learner, batch)
        values = [response.value for response in run_shards(mapper, shards.calls)]
        _require_equal_names(values)
        first = values[0]
        self._require_equal(str(sorted((name, part.shape[1:]) for name, part in first.items())))
        indexed = list(zip(shards.indices, values, strict=False))  # [] without own shards
        # Not every partitioner reports shard sizes, so lengths come from the values.
        lengths = {name: torch.zeros(shards.total, dtype=torch.int64) for name in first}
        for index, shard in indexed:
            for name, part in shard.items():
                lengths[name][index] = len(part)
        ends = {name: length.cumsum(0).tolist() for name, length in all_reduce(lengths).items()}
        # The sum of -0.0 and a number is that number, also if it is -0.0.
        whole = {
            n: part.new_full((ends[n][-1], *part.shape[1:]), -0.0) for n, part in first.items()
        }
        for index, shard in indexed:
            for name, part in shard.items():
                whole[name][ends[name][index] - len(part) : ends[name][index]] = part
        return {n: tensor.to(first[n].dtype) for n, tensor in all_reduce(whole).items()}

    def any_rank(self, flag: bool) -> bool:
        """See `Strategy`."""
        return all_reduce(float(flag), check=False) > 0

    def barrier(self) -> None:
        """See `Strategy`."""
        all_reduce(0.0, check=False)

    def broadcast_module(self, module: nn.Module) -> None:
        """See `Strategy`."""
        parameters = list(module.parameters())
        tensors = [*parameters, *module.buffers()]
        if not tensors:
            return
        flags = torch.tensor([p.requires_grad for p in parameters], device=tensors[0].device)
        with torch.no_grad():
            *copies, flags = broadcast([*(tensor.detach() for tensor in tensors), flags])
            for tensor, copy in zip(tensors, copies, strict=True):
                tensor.copy_(copy)
        for parameter, requires_grad in zip(parameters, flags.tolist(), strict=True):
            parameter.requires_grad_(bool(requires_grad))

    def check_replicas(self, tensors: Iterable[Tensor], iteration: int) -> None:
        """See `Strategy`."""
        digest = hashlib.sha256()
        for tensor in tensors:
            digest.update(
                tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
            )
        if different := _ranks_that_differ(digest.digest()):
            raise UserError(
                f"after iteration {iteration} the parameters or optimizer state of ranks "
                f"{different} differ from rank 0's: all ranks need the same processor type, the "
                "same versions and, to resume, the same checkpoint; resume from a checkpoint."
            )


class RpcStrategy(Strategy):
    """Rank zero partitions the batch and sends shards to the workers, of which it is one itself.

    Args:
        partitioner: splits a batch among the workers.
        reducer: combines the shards' results.
        gradient: "worker": each worker returns its part of the loss and of the gradient in one
            RPC and holds the graph of one chunk at a time. "dist_autograd": the graph spans the
            workers, and distributed autograd computes the gradient in a second pass.
        timeout_seconds: seconds within which a worker that died, froze or cannot be reached is
            detected.
        rendezvous_timeout_seconds: seconds by which the ranks' starts may differ.
        fanout: the number of other workers to which rank zero, and each worker in turn, sends
            requests.
        call_timeout: seconds that a call may take on workers that are alive.
    """

    name = "rpc"
    parameter_device = "cpu"
    every_rank_drives = False

    def __init__(
        self,
        partitioner: Partitioner,
        reducer: Callable[[list], Any],
        gradient: Literal["worker", "dist_autograd"] = "worker",
        timeout_seconds: Annotated[float, Gt(0)] = 30.0,
        fanout: Annotated[int, Gt(0)] = FANOUT,
        rendezvous_timeout_seconds: Annotated[float, Gt(0)] = RENDEZVOUS_TIMEOUT,
        call_timeout: Annotated[float, Gt(0), Le(MAX_TIMEOUT)] = 3600.0,
    ) -> None:
        super().__init__(partitioner, reducer)
        self.gradient = gradient
        self.timeout_seconds = timeout_seconds
        self.fanout = fanout
        self.rendezvous_timeout_seconds = rendezvous_timeout_seconds
        self.call_timeout = call_timeout

    def open(self) -> None:
        """Initialize RPC."""
        distributed.init_rpc(
            rendezvous_timeout=self.rendezvous_timeout_seconds,
            ping_timeout=_PING_SHARE * self.timeout_seconds,
        )

    def close(self, graceful: bool = True) -> None:
        """Shut RPC down. If graceful, this rank serves requests until every rank has called it."""
        distributed.shutdown_rpc(graceful)

    @property
    def sums_on_workers(self) -> bool:
        """True with gradient="worker" and a linear reducer only."""
        return self.gradient == "worker" and super().sums_on_workers

    def forward_backward(
        self, mapper: Mapper, learner: nn.Module, batch: Any, stop_requested: StopRequested = _never
    ) -> tuple[Any, bool]:
        """See `Strategy`."""
        learner.zero_grad(set_to_none=True)
        if self.gradient == "worker":
            result = self._call(mapper, learner, batch)
            with profile_range("reduce"):  # copies the gradient that came with the result
                if result.loss.requires_grad:
                    result.loss.backward()
        else:
            with distributed.autograd.context() as context_id:
                result = self._call(mapper, distributed.module_clone(learner, by="clone"), batch)
                with profile_range("backward"):
                    if result.loss.requires_grad:
                        distributed.autograd.backward(context_id, result.loss)
        detached: Any = optree.tree_map(
            lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, result
        )
        return detached, stop_requested()

    def _call(self, mapper: Mapper, learner: nn.Module, batch: Any) -> Any:
        """The reduced result.

        Raises:
            UserError: a reducer of the user's returned no scalar loss with a gradient.
        """
        result = distributed.remote_sync_call(
            mapper,
            args=(learner, batch),
            partitioner=self.partitioner,
            reducer=self.reducer,
            timeout=self.call_timeout,
            gradient=self.gradient,
            fanout=self.fanout,
        )
        if isinstance(self.reducer, LinearReducer):
            return result
        loss, name = getattr(result, "loss", None), type(self.reducer).__name__
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise UserError(
                f"the reducer {name} returned {result!r:.80}: return a result like those that it "
                "gets, such as results[0]._replace(loss=…), with a scalar loss."
            )
        if not loss.requires_grad and any(p.requires_grad for p in learner.parameters()):
            raise UserError(
                f"the loss that the reducer {name} returned has no gradient: compute it from the "
                "losses of the results, without detach() or torch.no_grad()."
            )
        return result

    def map_tasks(self, mapper: Mapper, learner: nn.Module, batch: Any) -> dict[str, Tensor]:
        """See `Strategy`."""
        with torch.no_grad():
            values = distributed.remote_sync_call(
                mapper,
                args=(learner, batch),
                partitioner=self.partitioner,
                timeout=self.call_timeout,
                fanout=self.fanout,
            )
        return _concatenated(values)


def _ranks_that_differ(content: bytes) -> list[int]:
    """The ranks whose content differs from rank zero's. Every rank calls it."""
    digest = int.from_bytes(hashlib.sha256(content).digest()[:7], "big")
    digests = all_gather(torch.tensor([digest]))
    return [rank for rank, d in enumerate(digests) if not torch.equal(d, digests[0])]


def _concatenated(values: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    _require_equal_names(values)
    return {name: torch.cat([shard[name] for shard in values]) for name in values[0]}


def _require_equal_names(values: Sequence[dict[str, Tensor]]) -> None:
    """Raise an error if the names of the shards' values differ."""
    names = set.union(*(shard.keys() ^ values[0].keys() for shard in values))
    if names:
        raise UserError(
            f"the metric {min(names)} was returned for some tasks and not for others: return the "
            "same metrics for every task."
        )


def _different_structure(ranks: list[int], others: str) -> str:
    return (
        f"the results of ranks {ranks} have other metrics or shapes than {others}: return the same "
        "metrics, of the same shapes, for every task."
    )


def _zeros_like(tree: Any) -> Any:
    def zero(leaf: Any) -> Any:
        return torch.zeros_like(leaf) if isinstance(leaf, Tensor) else 0 * leaf

    return optree.tree_map(zero, tree)


def _indices_of_rank(workers: list[WorkerID]) -> list[int]:
    """The indices of the entries of a list of workers that name this rank."""
    rank = get_rank()
    own_workers = {worker for worker in set(workers) if get_worker_id(worker) == rank}
    return [i for i, worker in enumerate(workers) if worker in own_workers]


def _set_gradient(
    trainable: list[nn.Parameter], gradient: list[Tensor | None], divisor: float | None
) -> None:
    """Divide the sums and put them into `.grad`, in the parameters' own type and layout."""
    for parameter, part in zip(trainable, gradient, strict=True):
        if part is None:
            parameter.grad = None
        else:
            grad = torch.empty_like(parameter, requires_grad=False)
            parameter.grad = torch.div(part.to(parameter.device), divisor or 1, out=grad)
