"""Reducers: one result from the results of all shards."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import optree
import torch

from metadist.distributed.shards import ShardResults


@dataclass(frozen=True)
class LinearReducer:
    """A reducer that is a weighted sum, so that workers can add up their own part first.

    It works leaf by leaf on tensors and numbers in tuples, lists, dicts and named tuples.
    """

    def coefficients(self, sizes: Sequence[float]) -> list[float]:
        """The weight of each shard's result, from what each shard held."""
        raise NotImplementedError

    def __call__(self, results: Sequence[Any]) -> Any:
        """Reduce results that all have the same structure.

        Raises:
            ValueError: there are no results, or their structures differ.
        """
        sizes = results.sizes if isinstance(results, ShardResults) else [1.0] * len(results)
        return weighted_sum(results, self.coefficients(sizes))


@dataclass(frozen=True)
class MeanReducer(LinearReducer):
    """The mean over items: each shard's result weighs what the shard held."""

    def coefficients(self, sizes: Sequence[float]) -> list[float]:
        """The shards' shares of all items."""
        total = sum(sizes)
        return [size / total for size in sizes]


@dataclass(frozen=True)
class SumReducer(LinearReducer):
    """The sum of the shards' results."""

    def coefficients(self, sizes: Sequence[float]) -> list[float]:
        """One for every shard."""
        return [1.0] * len(sizes)


mean_reducer = MeanReducer()
"""Averages the shards' results, weighted by what each shard held: 15 items on 2 workers average
like 15 items. A shard from a partitioner that does not say what it holds counts as one item."""

sum_reducer = SumReducer()
"""Adds the shards' results up."""


def weighted_sum(results: Sequence[Any], coefficients: Sequence[float]) -> Any:
    """The sum of `coefficient * result`, leaf by leaf; differentiable.

    A sum of whole numbers under coefficients of one stays whole; every other leaf becomes real.

    Raises:
        ValueError: there are no results, or their structures differ.
    """
    if not results:
        raise ValueError("there are no results to reduce: the partitioner made no shards.")

    def add_leaves(*leaves: Any) -> Any:
        if any(leaf is None for leaf in leaves):
            return None
        scaled = [
            leaf if coefficient == 1.0 else leaf * coefficient
            for leaf, coefficient in zip(leaves, coefficients, strict=True)
        ]
        if not isinstance(scaled[0], torch.Tensor):
            return sum(scaled)
        total = scaled[0]
        for term in scaled[1:]:
            total = total + term
        return total

    return optree.tree_map(add_leaves, results[0], *results[1:], none_is_leaf=True)
