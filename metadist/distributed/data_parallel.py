"""Weighted shards through torch's DistributedDataParallel."""

import contextlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from metadist.distributed.errors import connection_errors_as_worker_lost
from metadist.distributed.reducers import leaf_dtypes, weighted_sum


class _Apply(nn.Module):
    """A module whose forward applies a mapper to a shard, with the module among its arguments.

    Every parameter takes part in the loss, with a gradient of zero where the shard's own loss does
    not depend on it: DistributedDataParallel waits for all of them.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, function: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        result = function(*args, **kwargs)
        trainable = [each for each in self.module.parameters() if each.requires_grad]
        zeros = [each.flatten()[:0].sum() for each in trainable]
        return result._replace(loss=sum(zeros, result.loss))


class DataParallel:
    """Backward passes whose gradients DistributedDataParallel averages over the ranks.

    Every rank of a process group makes one, for equal modules.

    Args:
        module: its parameters get the gradient. Buffers are not synchronized.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._trainable = [each.requires_grad for each in module.parameters()]
        with warnings.catch_warnings():
            # Its replacement is missing in older versions and still sends buffers once.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated")
            self._parallel = DistributedDataParallel(_Apply(module), broadcast_buffers=False)

    def matches(self, module: nn.Module) -> bool:
        """Whether it was made for this module and the parameters that require grad now."""
        trainable = [each.requires_grad for each in module.parameters()]
        return module is self.module and trainable == self._trainable

    def backward(
        self,
        function: Callable[..., Any],
        calls: Sequence[tuple[tuple, dict]],
        weights: Sequence[float],
        divisor: float | None,
    ) -> tuple[Any, list[torch.dtype | None]]:
        """Run this rank's shards; `.grad` gets the gradient of the weighted sum over all ranks.

        All ranks call it, each with at least one call. One shard's graph is alive at a time.

        Args:
            function: the mapper; its result has a scalar `loss`.
            calls: (args, kwargs) of each shard, with the module among them.
            weights: how often each shard counts in the sum over all ranks.
            divisor: what that sum is divided by; None for a sum.

        Returns:
            This rank's part of the weighted sum of results, not divided, in float64 and without a
            graph, and the final types of its leaves.
        """
        self.module.zero_grad(set_to_none=True)
        results = []
        for index, ((args, kwargs), weight) in enumerate(zip(calls, weights, strict=True)):
            last = index == len(calls) - 1
            with contextlib.nullcontext() if last else self._parallel.no_sync():
                result = self._parallel(function, args, kwargs)
                # The ranks' gradients are averaged, not added.
                with connection_errors_as_worker_lost(), warnings.catch_warnings():
                    # It copies gradients of another layout (channels last): correct and cheap.
                    warnings.filterwarnings("ignore", "Grad strides do not match bucket view")
                    (result.loss * (weight / (divisor or 1) * dist.get_world_size())).backward()
            results.append(result._replace(loss=result.loss.detach()))
        return weighted_sum(results, weights), leaf_dtypes(results[0])
