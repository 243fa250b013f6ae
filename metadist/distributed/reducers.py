"""Reducers: one result from the results of all shards."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import optree
import torch

from metadist.distributed.partitioners import ShardResults


@dataclass(frozen=True)
class LinearReducer:
    """A reducer that is a weighted sum, so that workers can add up their own part first.

    It works leaf by leaf on tensors and numbers in tuples, lists, dicts and named tuples.
    """

    def coefficients(self, sizes: Sequence[float]) -> list[float]:
        """The weight of each shard's result, from what each shard held.

        Weights are all `int`, and leave whole numbers whole, or all `float`, and make floats of
        them, so that every worker's part of a sum has the same types.
        """
        raise NotImplementedError

    def __call__(self, results: Sequence[Any]) -> Any:
        """Reduce results that all have the same structure.

        Raises:
            ValueError: there are no results, or their structures differ.
        """
        sizes = results.sizes if isinstance(results, ShardResults) else [1.0] * len(results)
        total = wide_sum(results, self.coefficients(sizes))
        return narrow(total, dtypes(results[0]))


@dataclass(frozen=True)
class MeanReducer(LinearReducer):
    """The mean over items: each shard's result weighs what the shard held."""

    def coefficients(self, sizes: Sequence[float]) -> list[float]:
        """The shards' shares of all items."""
        total = sum(sizes)
        return [size / total for size in sizes]


@dataclass(frozen=True)
class SumReducer(LinearReducer):
    """The sum of the shards' results.

    Attributes:
        of_items: results are means over their shards' items: each counts as often as its shard
            has items, and the sum over items is the same however they were split.
    """

    of_items: bool = False

    def coefficients(self, sizes: Sequence[float]) -> list[float]:
        """One for every shard, or the shards' sizes."""
        return [float(size) for size in sizes] if self.of_items else [1] * len(sizes)


mean_reducer = MeanReducer()
"""Averages the shards' results, weighted by what each shard held: 15 items on 2 workers average
like 15 items. A shard from a partitioner that does not say what it holds counts as one item."""

sum_reducer = SumReducer()
"""Adds the shards' results up."""


# --- sums that do not depend on how they are split ---------------------------------------------
#
# Partial sums travel and are added in float64, and only the whole is rounded to the results' own
# type. Sums of a few float32 numbers are then the same, to the last bit but for rare ties,
# however the shards were spread over the workers. Without it, Adam's first steps blow a
# difference in the last bit up a thousandfold within a few iterations.


def wide_sum(results: Sequence[Any], coefficients: Sequence[float]) -> Any:
    """The sum of `coefficient * result`, leaf by leaf, floating-point tensors in float64.

    Differentiable. None stays None. Weights that are floats make floats of whole numbers.

    Raises:
        ValueError: there are no results, or their structures differ.
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
        total: Any = None
        for leaf, coefficient in zip(leaves, coefficients, strict=True):
            term = _weigh(wide(leaf), coefficient)
            total = term if total is None else total + term
        return total

    return optree.tree_map(add_leaves, results[0], *results[1:])


def _weigh(leaf: Any, coefficient: float) -> Any:
    if isinstance(coefficient, int):
        return leaf if coefficient == 1 else leaf * coefficient
    if isinstance(leaf, torch.Tensor) and not leaf.dtype.is_complex:
        leaf = leaf.double()  # whole numbers: times a float they would be float32
    return leaf * coefficient


def wide(leaf: Any) -> Any:
    """A leaf in the type that partial sums have: float64 for real tensors, int64 for flags."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if leaf.dtype is torch.bool:
        return leaf.long()
    return leaf.double() if leaf.is_floating_point() else leaf


def dtypes(tree: Any) -> list[torch.dtype | None]:
    """The type of each leaf, None for what is no real tensor."""
    return [
        leaf.dtype if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else None
        for leaf in optree.tree_leaves(tree, none_is_leaf=True)
    ]


def narrow(tree: Any, types: Sequence[torch.dtype | None]) -> Any:
    """The structure with its real tensors rounded to `types`, the `dtypes` of one result."""
    leaves, structure = optree.tree_flatten(tree, none_is_leaf=True)
    rounded = [
        leaf if dtype is None else leaf.to(dtype) for leaf, dtype in zip(leaves, types, strict=True)
    ]
    return optree.tree_unflatten(structure, rounded)
