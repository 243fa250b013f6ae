from . import autograd, collectives
from .calls import remote_async_call, remote_sync_call
from .errors import WorkerLostError
from .modules import module_clone
from .parallel import parallelize, parallelize_async, parallelize_sync
from .partitioners import (
    Shard,
    ShardResults,
    batch_partitioner,
    dim_partitioner,
    exclusive_batch_partitioner,
)
from .reducers import mean_reducer, sum_reducer
from .requests import RemoteError
from .rpc import auto_init_rpc, init_rpc
from .transport import (
    barrier,
    get_worker_id,
    rpc_is_initialized,
    shutdown_rpc,
)
from .world import (
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
