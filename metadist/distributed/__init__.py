"""Distributed training as MapReduce: partitioner, mapper, reducer.

torch.distributed is imported in this package alone. torch.distributed.rpc and
torch.distributed.autograd are imported when one of the names that need them is first used:
`auto_init_rpc`, `init_rpc`, `autograd`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from metadist.distributed import collectives
from metadist.distributed.calls import RemoteError, remote_async_call, remote_sync_call
from metadist.distributed.errors import WorkerLostError
from metadist.distributed.modules import module_clone
from metadist.distributed.parallel import parallelize, parallelize_async, parallelize_sync
from metadist.distributed.partitioners import (
    Shard,
    ShardResults,
    batch_partitioner,
    dim_partitioner,
    exclusive_batch_partitioner,
)
from metadist.distributed.reducers import mean_reducer, sum_reducer
from metadist.distributed.transport import (
    barrier,
    get_worker_id,
    rpc_is_initialized,
    shutdown_rpc,
)
from metadist.distributed.world import (
    WorldInfo,
    get_local_rank,
    get_local_world_size,
    get_rank,
    get_world_info,
    get_world_rank,
    get_world_size,
    not_on_rank,
    on_rank,
    rank_non_zero_only,
    rank_zero_only,
)

if TYPE_CHECKING:
    from metadist.distributed import autograd
    from metadist.distributed.rpc import auto_init_rpc, init_rpc

__all__ = [
    "RemoteError",
    "Shard",
    "ShardResults",
    "WorkerLostError",
    "WorldInfo",
    "auto_init_rpc",
    "autograd",
    "barrier",
    "batch_partitioner",
    "collectives",
    "dim_partitioner",
    "exclusive_batch_partitioner",
    "get_local_rank",
    "get_local_world_size",
    "get_rank",
    "get_worker_id",
    "get_world_info",
    "get_world_rank",
    "get_world_size",
    "init_rpc",
    "mean_reducer",
    "module_clone",
    "not_on_rank",
    "on_rank",
    "parallelize",
    "parallelize_async",
    "parallelize_sync",
    "rank_non_zero_only",
    "rank_zero_only",
    "remote_async_call",
    "remote_sync_call",
    "rpc_is_initialized",
    "shutdown_rpc",
    "sum_reducer",
]


def __getattr__(name: str) -> Any:
    if name == "autograd":
        return importlib.import_module("metadist.distributed.autograd")
    if name in ("auto_init_rpc", "init_rpc"):
        return getattr(importlib.import_module("metadist.distributed.rpc"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
