"""Partitioners: who gets which part of a call's arguments."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import optree
import torch

from metadist.distributed.shards import Shard, WorkerID
from metadist.distributed.world import get_world_size
from metadist.errors import UserError


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
        leaves, structure = optree.tree_flatten((args, kwargs), none_is_leaf=True)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        length = self._common_length(tensors)
        workers = range(get_world_size()) if self.workers is None else self.workers
        bounds = balanced_bounds(length, len(workers))
        shards = []
        for worker, (start, stop) in zip(workers, bounds, strict=True):
            if self.exclusive:
                pieces = [(index, index + 1) for index in range(start, stop)]
            else:
                pieces = [(start, stop)] if start < stop else []
            for first, last in pieces:
                parts = [self._slice(leaf, first, last) for leaf in leaves]
                part_args, part_kwargs = optree.tree_unflatten(structure, parts)
                shards.append(Shard(worker, part_args, part_kwargs, size=last - first))
        return shards

    def _common_length(self, tensors: list[torch.Tensor]) -> int:
        if not tensors:
            raise UserError(
                f"{self!r} found no tensor among the call's arguments to split; give the call a "
                "tensor, or name one worker as its partitioner."
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
                f"{self!r} needs tensors of one length along dimension {self.dim}, "
                f"got lengths {lengths}."
            )
        return lengths[0]

    def _slice(self, leaf: Any, first: int, last: int) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if self.exclusive and not self.keepdim:
            return leaf.select(self.dim, first)
        return leaf.narrow(self.dim, first, last - first)


def balanced_bounds(length: int, parts: int) -> list[tuple[int, int]]:
    """Contiguous ranges that cover `length` items in order, of sizes that differ by at most one.

    Args:
        length: the number of items, not negative.
        parts: the number of ranges, at least one; the first ranges are the larger ones.
    """
    share, larger = divmod(length, parts)
    bounds = []
    start = 0
    for part in range(parts):
        stop = start + share + (part < larger)
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
    a number) goes to every shard as it is. Workers get contiguous runs of items, in order, whose
    lengths differ by at most one.

    Args:
        dim: the dimension to split; all tensors must have the same length there.
        exclusive: False gives each worker one shard with all its items; True makes every item a
            shard of its own, run one after the other on the item's worker.
        keepdim: True keeps `dim` in each shard (of length one when exclusive); False removes it,
            which needs `exclusive=True`: `(T, B, *)` becomes T times `(B, *)`.
        workers: the numbers or names of those who share the work. Default: all workers of the
            world as it is when the call is made.

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
        raise UserError("dim_partitioner(workers=[]) names nobody: name a worker or leave it out.")
    return DimPartitioner(dim, exclusive, keepdim, chosen)


batch_partitioner = dim_partitioner(0, exclusive=False, keepdim=True)
"""Splits the first dimension into one shard a worker: data parallelism."""

exclusive_batch_partitioner = dim_partitioner(0, exclusive=True, keepdim=True)
"""Splits the first dimension into shards of one item each, the dimension kept."""
