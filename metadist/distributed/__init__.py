"""Distributed training in the words of MapReduce: partitioner, mapper, reducer.

`torch.distributed.rpc` is touched in this package alone.
"""

from metadist.distributed import autograd, collectives
from metadist.distributed.barriers import barrier
from metadist.distributed.calls import RemoteError, remote_async_call, remote_sync_call
from metadist.distributed.lost import PeerLost
from metadist.distributed.modules import module_clone
from metadist.distributed.parallel import parallelize, parallelize_async, parallelize_sync
from metadist.distributed.partitioners import (
    batch_partitioner,
    dim_partitioner,
    exclusive_batch_partitioner,
)
from metadist.distributed.ranks import not_on_rank, on_rank, rank_non_zero_only, rank_zero_only
from metadist.distributed.reducers import mean_reducer, sum_reducer
from metadist.distributed.rpc import auto_init_rpc, init_rpc, shutdown_rpc
from metadist.distributed.shards import Shard, ShardResults
from metadist.distributed.workers import get_worker_id, rpc_is_initialized
from metadist.distributed.world import (
    WorldInfo,
    get_local_rank,
    get_local_world_size,
    get_rank,
    get_world_info,
    get_world_rank,
    get_world_size,
)

__all__ = [
    "PeerLost",
    "RemoteError",
    "Shard",
    "ShardResults",
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
