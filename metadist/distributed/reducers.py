"""Reducers combine the results of all shards into one result.

A reduction gives the same bits however the items are split among shards, chunks and workers:

- Weights are integers (1, or the size of a shard), and only the finished sum is divided, once.
  Weights such as 1/5 would be rounded, and their sums would fall on different sides of exact ties
  for different splits.
- Partial sums are float64, and only the quotient is rounded to the type of the results. The sum of
  n float32 values is exact in float64, and therefore the same in any order, unless a nonzero value
  is smaller than the largest one by a factor of 2^29 / n or more. In that case the order changes
  the sum by a relative 2^-53, and the rounded float32 with a probability of about 2^-29.

If the results are float64, the sum itself is rounded, and its last bits depend on the split.
"""

import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import optree
import torch

from metadist.distributed.partitioners import ShardResults
from metadist.errors import UserError


@dataclass(frozen=True)
class LinearReducer:
    """A weighted sum, divided by a number or not: each worker can sum its own results first.

    It reduces tensors and numbers in tuples, lists, dicts and named tuples leaf by leaf.
    """

    def weights(self, sizes: Sequence[float]) -> list[float]:
        """The weight of each shard's result in the sum.

        Either all weights are `int`, and integer results remain integers, or all are `float`, and
        integer results become floats, so that all workers' partial sums have the same types.

        Args:
            sizes: the number of items of each shard.
        """
        raise NotImplementedError

    def divisor(self, sizes: Sequence[float]) -> float | None:
        """The divisor of the finished sum; None to return the sum itself.

        Args:
            sizes: the number of items of each shard.
        """
        return None

    @property
    def weights_items_equally(self) -> bool:
        """Whether the result is the same for any split of the items into shards, if the result of a
        shard is the mean over its items. Default: False.
        """
        return False

    def __call__(self, results: Sequence[Any]) -> Any:
        """Reduce results that all have the same structure.

        Raises:
            ValueError: there are no results, or their structures differ.
        """
        sizes = results.sizes if isinstance(results, ShardResults) else [1.0] * len(results)
        total = weighted_sum(results, self.weights(sizes))
        return finish_sum(total, self.divisor(sizes), leaf_dtypes(results[0]))


@dataclass(frozen=True)
class MeanReducer(LinearReducer):
    """The mean over items: each shard's result is a mean, weighted by the shard's size."""

    def weights(self, sizes: Sequence[float]) -> list[float]:
        """The shards' sizes."""
        return [float(size) for size in sizes]

    def divisor(self, sizes: Sequence[float]) -> float | None:
        """The number of items.

        Raises:
            UserError: no shard has an item.
        """
        items = float(sum(sizes))
        if not items and len(sizes):
            raise UserError(
                "the sizes of all shards are 0, and the mean of no items is undefined: give each "
                "Shard the number of its items, and leave out those without items."
            )
        return items

    @property
    def weights_items_equally(self) -> bool:
        """True, except in a subclass."""
        return type(self) is MeanReducer


@dataclass(frozen=True)
class SumReducer(LinearReducer):
    """The sum of the shards' results.

    Attributes:
        of_items: whether results are means over the items of their shards. Each result is then
            weighted by its shard's size, and the sum over items does not depend on how they were
            split. Otherwise an item of a small shard has a larger weight than one of a large shard,
            also in logged metrics and running statistics.
    """

    of_items: bool = False

    def weights(self, sizes: Sequence[float]) -> list[float]:
        """1 for every shard, or the shards' sizes with `of_items`."""
        return [float(size) for size in sizes] if self.of_items else [1] * len(sizes)

    @property
    def weights_items_equally(self) -> bool:
        """True with `of_items`, except in a subclass."""
        return type(self) is SumReducer and self.of_items


mean_reducer = MeanReducer()
"""Averages the shards' results, weighted by the shards' sizes: 15 items have the same average on 2
workers as on one. A shard without a size counts as one item."""

sum_reducer = SumReducer()
"""Adds the shards' results."""


def weighted_sum(results: Sequence[Any], weights: Sequence[float]) -> Any:
    """The sum of `weight * result`, leaf by leaf, floating-point tensors and arrays in float64.

    Differentiable. None stays None. Integers are summed in int64, or as floats if the weights are
    floats.

    Raises:
        ValueError: there are no results, or their structures or shapes differ.
        TypeError: a leaf is neither a tensor nor a number.
    """
    if not results:
        raise ValueError("there are no results to reduce: the partitioner made no shards.")
    structures = {optree.tree_structure(result) for result in results}
    if len(structures) > 1:
        raise ValueError(
            "results of different structures cannot be reduced: "
            f"{' and '.join(sorted(map(str, structures)))}."
        )

    def add_leaves(*leaves: Any) -> Any:
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor | np.ndarray | numbers.Number):
                raise TypeError(
                    f"results hold {type(leaf).__name__}, and only tensors and numbers can be "
                    "reduced: leave it out, or pass a reducer of your own."
                )
        shapes = sorted({tuple(getattr(leaf, "shape", ())) for leaf in leaves})
        if len(shapes) > 1:
            raise ValueError(
                f"results of different shapes cannot be reduced: {' and '.join(map(str, shapes))}; "
                "return what does not grow with a shard, such as a sum or a mean."
            )
        total: Any = None
        for leaf, weight in zip(leaves, weights, strict=True):
            term = _weighted(to_float64(leaf), weight)
            total = term if total is None else total + term
        return total

    return optree.tree_map(add_leaves, results[0], *results[1:])


def _weighted(leaf: Any, weight: float) -> Any:
    if isinstance(weight, int):
        return leaf if weight == 1 else leaf * weight
    if isinstance(leaf, torch.Tensor) and not leaf.dtype.is_complex:
        leaf = leaf.double()  # an integer tensor times a float would be float32
    return leaf * weight


def finish_sum(total: Any, divisor: float | None, dtypes: Sequence[torch.dtype | None]) -> Any:
    """Divide a sum, and round its leaves.

    Args:
        total: the sum of the weighted results, in the types of `to_float64`.
        divisor: the number to divide by; None for a sum.
        dtypes: the `leaf_dtypes` of one result.
    """
    leaves, structure = optree.tree_flatten(total, none_is_leaf=True)
    if divisor is not None:
        leaves = [None if leaf is None else leaf / divisor for leaf in leaves]
    rounded = [
        leaf if dtype is None else leaf.to(dtype)
        for leaf, dtype in zip(leaves, dtypes, strict=True)
    ]
    return optree.tree_unflatten(structure, rounded)


def to_float64(leaf: Any) -> Any:
    """Convert a leaf to the type of partial sums: float64 for real tensors, int64 for integers."""
    if isinstance(leaf, np.ndarray | np.generic):
        if np.iscomplexobj(leaf):
            return leaf
        return leaf.astype(np.float64 if np.issubdtype(leaf.dtype, np.floating) else np.int64)
    if not isinstance(leaf, torch.Tensor):
        return int(leaf) if isinstance(leaf, bool) else leaf
    if leaf.is_floating_point():
        return leaf.double()
    return leaf if leaf.is_complex() else leaf.long()


def leaf_dtypes(tree: Any) -> list[torch.dtype | None]:
    """The dtype of each leaf that is a real floating-point tensor, None for other leaves."""
    return [
        leaf.dtype if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else None
        for leaf in optree.tree_leaves(tree, none_is_leaf=True)
    ]
