"""Shards of a call's arguments, the partitioners that make them, and their results."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import optree
import torch

from metadist.distributed.world import get_world_size
from metadist.errors import UserError

WorkerID = int | str
"""A worker's rank or its name."""


class Shard(tuple):
    """A triple `(worker, args, kwargs)` with a size.

    Attributes:
        size: the number of items in the shard, its weight in a mean.
    """

    size: float

    def __new__(
        cls, worker: WorkerID, args: tuple = (), kwargs: dict | None = None, size: float = 1
    ) -> "Shard":
        """Args: the worker's rank or name, the call's arguments, the number of items."""
        shard = super().__new__(cls, (worker, args, kwargs or {}))
        shard.size = size
        return shard

    def __reduce__(self) -> tuple:
        return Shard, (*self, self.size)


Partitioner = Callable[..., Sequence[tuple[WorkerID, tuple, dict]]]
"""(*args, **kwargs) -> [(worker, args, kwargs), …]; a plain triple has size 1."""


def as_shards(triples: Iterable[tuple[WorkerID, tuple, dict]]) -> list[Shard]:
    """The triples of any partitioner as `Shard`s. A plain triple has size 1.

    Raises:
        TypeError: something other than triples.
    """
    shards = []
    for triple in triples:
        if not isinstance(triple, tuple) or len(triple) != 3:
            raise TypeError(
                "a partitioner must return a list of Shard(worker, args, kwargs, size) or of "
                "(worker, args, kwargs), whose size is 1; "
                f"it returned {type(triple).__name__} {triple!r:.80}."
            )
        shards.append(triple if isinstance(triple, Shard) else Shard(*triple))
    return shards


class ShardResults(list):
    """The results of a call in the shards' order, with the shards' sizes.

    It is a list; a reducer that weights its results reads `sizes`.

    Attributes:
        sizes: the number of items of each shard.
    """

    def __init__(self, results: Iterable[Any], sizes: Iterable[float] | None = None) -> None:
        super().__init__(results)
        self.sizes = [1.0] * len(self) if sizes is None else [float(size) for size in sizes]


Reducer = Callable[[list], Any]
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
            UserError: no tensor to split, tensors of unequal length, or no such dimension.
        """
        everything: Any = (args, kwargs)
        leaves, structure = optree.tree_flatten(everything, none_is_leaf=True)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        length = self._common_length(tensors)
        workers = range(get_world_size()) if self.workers is None else self.workers
        if len(workers) == 1 and length and not self.exclusive:
            return [Shard(workers[0], args, kwargs, size=length)]
        pieces: list[tuple[WorkerID, int, int]] = []
        bounds = balanced_bounds(length, len(workers))
        for worker, (start, stop) in zip(workers, bounds, strict=True):
            if self.exclusive:
                pieces += ((worker, index, index + 1) for index in range(start, stop))
            elif start < stop:
                pieces.append((worker, start, stop))
        shards = []
        columns = [self._slices(leaf, pieces) for leaf in leaves]
        for (worker, first, last), *parts in zip(pieces, *columns, strict=True):
            call: Any = structure.unflatten(parts)
            part_args, part_kwargs = call
            shards.append(Shard(worker, part_args, part_kwargs, size=last - first))
        return shards

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

    def _slices(self, leaf: Any, pieces: list[tuple[WorkerID, int, int]]) -> Iterable[Any]:
        if not isinstance(leaf, torch.Tensor):
            return [leaf] * len(pieces)
        if not self.exclusive or self.keepdim:
            return [leaf.narrow(self.dim, first, last - first) for _, first, last in pieces]
        if leaf.requires_grad:  # autograd refuses to change views of `unbind` in place
            return [leaf.select(self.dim, first) for _, first, _ in pieces]
        return leaf.unbind(self.dim)


def balanced_bounds(length: int, parts: int) -> list[tuple[int, int]]:
    """Contiguous ranges that cover `length` items in order, of sizes that differ by at most one.

    Args:
        length: the number of items, not negative.
        parts: the number of ranges, at least one; the first ranges are the larger ones.
    """
    quotient, larger = divmod(length, parts)
    bounds = []
    start = 0
    for part in range(parts):
        stop = start + quotient + (part < larger)
        bounds.append((start, stop))
        start = stop
    return bounds


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
            item; a worker runs its shards in order.
        keepdim: True keeps `dim` in each shard (of length one when exclusive); False removes it,
            which needs `exclusive=True`: `(T, B, *)` becomes T times `(B, *)`.
        workers: ranks or names of the workers to use. Default: all workers at the
            time of the call.

    Raises:
        UserError: `keepdim=False` without `exclusive=True`, or an empty list of workers.
    """
    if not keepdim and not exclusive:
        raise UserError(
            "dim_partitioner(keepdim=False) needs exclusive=True: "
            "a shard of several items cannot lose their dimension."
        )
    chosen = None if workers is None else tuple(workers)
    if chosen == ():
        raise UserError(
            "dim_partitioner(workers=[]) is empty: name at least one worker, or omit it."
        )
    return DimPartitioner(dim, exclusive, keepdim, chosen)


batch_partitioner = dim_partitioner(0, exclusive=False, keepdim=True)
"""Splits the first dimension into one shard per worker: data parallelism."""

exclusive_batch_partitioner = dim_partitioner(0, exclusive=True, keepdim=True)
"""Splits the first dimension into shards of one item each, the dimension kept."""
