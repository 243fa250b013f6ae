"""Shards of a call's arguments, the partitioners that create them, and the shards' results."""

import itertools
import numbers
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import optree
import torch

from metadist.distributed.world import get_world_size
from metadist.errors import UserError

WorkerID = int | str
"""A worker's rank or its name."""


class Shard(tuple[Any, ...]):
    """A triple `(worker, args, kwargs)` with a size.

    Attributes:
        size: the number of items in the shard, its weight in a mean.
    """

    size: float

    def __new__(
        cls,
        worker: WorkerID,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        size: float = 1,
    ) -> "Shard":
        """Create a shard.

        Args:
            worker: the worker's rank or name.
            args: the positional arguments of the call.
            kwargs: the keyword arguments of the call.
            size: the number of items.
        """
        shard = super().__new__(cls, (worker, args, kwargs or {}))
        shard.size = size
        return shard

    def __reduce__(self) -> tuple:
        return Shard, (*self, self.size)


Partitioner = Callable[..., Sequence[tuple[WorkerID, tuple[Any, ...], dict[str, Any]]]]
"""(*args, **kwargs) -> [(worker, args, kwargs), …]; a plain triple has size 1."""


def as_shards(
    triples: Iterable[tuple[WorkerID, tuple[Any, ...], dict[str, Any]]],
) -> list[Shard]:
    """Convert the triples of any partitioner to `Shard`s. A plain triple gets size 1.

    Raises:
        TypeError: `triples` is not iterable, or an element is not a triple.
    """
    expected = (
        "a partitioner must return a list of Shard(worker, args, kwargs, size) or of "
        "(worker, args, kwargs), whose size is 1; it returned"
    )
    if not isinstance(triples, Iterable):
        raise TypeError(f"{expected} {triples!r:.80}.")
    shards = []
    for triple in triples:
        if not isinstance(triple, tuple) or len(triple) != 3:
            raise TypeError(f"{expected} {type(triple).__name__} {triple!r:.80}.")
        shards.append(triple if isinstance(triple, Shard) else Shard(*triple))
    return shards


class ShardResults(list[Any]):
    """The results of a call in the shards' order, with the shards' sizes.

    A list with an attribute `sizes`, which reducers that weight the results read.

    Attributes:
        sizes: the number of items of each shard.
    """

    def __init__(self, results: Iterable[Any], sizes: Iterable[float] | None = None) -> None:
        super().__init__(results)
        self.sizes = [1.0] * len(self) if sizes is None else [float(size) for size in sizes]


def with_plain_lists(tree: Any) -> Any:
    """A structure with lists in place of `ShardResults`, which optree does not look into.

    Args:
        tree: arguments or results of a function that runs on workers.
    """

    def plain(leaf: Any) -> Any:
        return with_plain_lists(list(leaf)) if isinstance(leaf, ShardResults) else leaf

    return optree.tree_map(plain, tree, none_is_leaf=True)


Reducer = Callable[[list[Any]], Any]
"""(results in the shards' order) -> result."""


@dataclass(frozen=True)
class DimPartitioner:
    """Splits every tensor among the arguments along one dimension; see `dim_partitioner`."""

    dim: int = 0
    exclusive: bool = False
    keepdim: bool = True
    workers: tuple[WorkerID, ...] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> list[Shard]:
        """The shards of one call, in the order of the items.

        Raises:
            UserError: the arguments contain no tensor, the tensors' lengths differ, or a tensor
                does not have the dimension.
        """
        arguments: Any = (args, kwargs)
        leaves, structure = optree.tree_flatten(arguments, none_is_leaf=True)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        length = self._common_length(tensors)
        workers = range(get_world_size()) if self.workers is None else self.workers
        if len(workers) == 1 and length and not self.exclusive:
            return [Shard(workers[0], args, kwargs, size=length)]
        ranges: list[tuple[WorkerID, int, int]] = []
        bounds = balanced_bounds(length, len(workers))
        for worker, (start, stop) in zip(workers, bounds, strict=True):
            if self.exclusive:
                ranges += ((worker, index, index + 1) for index in range(start, stop))
            elif start < stop:
                ranges.append((worker, start, stop))
        shards = []
        slices = [self._slices(leaf, ranges) for leaf in leaves]
        for (worker, start, stop), *shard_leaves in zip(ranges, *slices, strict=True):
            call: Any = structure.unflatten(shard_leaves)
            shard_args, shard_kwargs = call
            shards.append(Shard(worker, shard_args, shard_kwargs, size=stop - start))
        return shards

    def with_one_shard_per_worker(self) -> "DimPartitioner":
        """The partitioner that gives each worker the same items in one shard."""
        return replace(self, exclusive=False, keepdim=True)

    def _common_length(self, tensors: list[torch.Tensor]) -> int:
        if not tensors:
            raise UserError(
                f"{self!r} found no tensor to split among the call's arguments; pass a "
                "tensor, or name one worker as the partitioner."
            )
        for tensor in tensors:
            if not -tensor.dim() <= self.dim < tensor.dim():
                raise UserError(
                    f"{self!r} cannot split a tensor of shape {tuple(tensor.shape)}: "
                    f"it has no dimension {self.dim}."
                )
        lengths = sorted({tensor.shape[self.dim] for tensor in tensors})
        if len(lengths) > 1:
            raise UserError(
                f"{self!r} splits every tensor among the arguments and needs one length along "
                f"dimension {self.dim}, got lengths {lengths}: pass parameters inside a module, or "
                "use a partitioner of your own."
            )
        return lengths[0]

    def _slices(self, leaf: Any, ranges: list[tuple[WorkerID, int, int]]) -> Iterable[Any]:
        if not isinstance(leaf, torch.Tensor):
            return [leaf] * len(ranges)
        if not self.exclusive or self.keepdim:
            return [leaf.narrow(self.dim, start, stop - start) for _, start, stop in ranges]
        if leaf.requires_grad:  # autograd refuses to change views of `unbind` in place
            return [leaf.select(self.dim, start) for _, start, _ in ranges]
        return leaf.unbind(self.dim)


def balanced_bounds(length: int, parts: int) -> list[tuple[int, int]]:
    """Split `length` items into contiguous ranges whose sizes differ by at most one.

    Args:
        length: the number of items, not negative.
        parts: the number of ranges, at least one; the first ranges are the larger ones.
    """
    quotient, remainder = divmod(length, parts)
    starts = [part * quotient + min(part, remainder) for part in range(parts + 1)]
    return list(itertools.pairwise(starts))


def dim_partitioner(
    dim: int = 0,
    *,
    exclusive: bool = False,
    keepdim: bool = True,
    workers: Iterable[WorkerID] | None = None,
) -> DimPartitioner:
    """A partitioner that splits every tensor among a call's arguments along dimension `dim`.

    Tensors inside tuples, lists, dicts and named tuples are split too; everything else (a model,
    a number) is passed to every shard. Workers get contiguous ranges of items, in order, whose
    lengths differ by at most one.

    Args:
        dim: the dimension to split; all tensors must have the same length there.
        exclusive: False gives each worker one shard with all its items; True makes one shard per
            item, and a worker runs its shards in order.
        keepdim: True keeps `dim` in each shard (of length one when exclusive); False removes it,
            which needs `exclusive=True`: `(T, B, *)` becomes T times `(B, *)`.
        workers: the ranks or names of the workers to use. Default: all workers at the time of the
            call.

    Raises:
        UserError: `dim` is no integer, `keepdim` is False without `exclusive`, or `workers` is
            empty or a text.
    """
    if not isinstance(dim, numbers.Integral) or isinstance(dim, bool):
        raise UserError(
            f"dim_partitioner(dim={dim!r}) needs an integer: give the dimension's index."
        )
    if not keepdim and not exclusive:
        raise UserError(
            "dim_partitioner(keepdim=False) needs exclusive=True: "
            "a shard of several items cannot lose their dimension."
        )
    if isinstance(workers, str):
        raise UserError(
            f"dim_partitioner(workers={workers!r}) needs a list: write workers=[{workers!r}]."
        )
    worker_ids = None if workers is None else tuple(workers)
    if worker_ids == ():
        raise UserError(
            "dim_partitioner(workers=[]) is empty: name at least one worker, or omit it."
        )
    return DimPartitioner(int(dim), exclusive, keepdim, worker_ids)


batch_partitioner = dim_partitioner(0, exclusive=False, keepdim=True)
"""Splits the first dimension into one shard per worker: data parallelism."""

exclusive_batch_partitioner = dim_partitioner(0, exclusive=True, keepdim=True)
"""Splits the first dimension into shards of one item each, and keeps the dimension."""
