"""Weighted shards with torch's DistributedDataParallel."""

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

    The loss depends on every parameter, with a gradient of zero for parameters that the shard's
    loss does not use: DistributedDataParallel waits for the gradients of all parameters.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, function: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        result = function(*args, **kwargs)
        trainable = [p for p in self.module.parameters() if p.requires_grad]
        zeros = [parameter.flatten()[:0].sum() for parameter in trainable]
        return result._replace(loss=sum(zeros, result.loss))


class DataParallel:
    """Backward passes whose gradients DistributedDataParallel averages over the ranks.

    Every rank of a process group creates one, for equal modules.

    Args:
        module: the module whose parameters get the gradient. Buffers are not synchronized.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._trainable = [parameter.requires_grad for parameter in module.parameters()]
        with warnings.catch_warnings():
            # The replacement is missing in older versions and still sends buffers once.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated")
            self._parallel = DistributedDataParallel(_Apply(module), broadcast_buffers=False)

    def matches(self, module: nn.Module) -> bool:
        """Whether this was created for the module and the parameters that now require grad."""
        trainable = [parameter.requires_grad for parameter in module.parameters()]
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
            calls: the (args, kwargs) of each shard, with the module among them.
            weights: the weight of each shard in the sum over all ranks.
            divisor: the divisor of that sum; None to keep the sum itself.

        Returns:
            This rank's part of the weighted sum of results, not divided, in float64 and without a
            graph, and the final dtypes of its leaves.
        """
        self.module.zero_grad(set_to_none=True)
        results = []
        for index, ((args, kwargs), weight) in enumerate(zip(calls, weights, strict=True)):
            is_last = index == len(calls) - 1
            with contextlib.nullcontext() if is_last else self._parallel.no_sync():
                result = self._parallel(function, args, kwargs)
                # The ranks' gradients are averaged, not added.
                with connection_errors_as_worker_lost(), warnings.catch_warnings():
                    # It copies gradients of another layout (channels last): correct and cheap.
                    warnings.filterwarnings("ignore", "Grad strides do not match bucket view")
                    (result.loss * (weight / (divisor or 1) * dist.get_world_size())).backward()
            results.append(result._replace(loss=result.loss.detach()))
        return weighted_sum(results, weights), leaf_dtypes(results[0])
