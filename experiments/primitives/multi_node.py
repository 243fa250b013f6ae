"""The node of each rank, an RPC from each rank to the next, and an all-reduce.

On two nodes, and on one:

experiments/primitives/multi_node.sh
torchrun --standalone --nproc_per_node=2 experiments/primitives/multi_node.py
"""

import os

import metadist as todist
from metadist.distributed import collectives


def location() -> str:
    """Rank and node of the process that executes this function."""
    info = todist.get_world_info()
    node = os.environ.get("GROUP_RANK", "0")
    return f"rank {info.rank} of {info.world_size} (node {node}, local rank {info.local_rank})"


@todist.auto_init_rpc()
def main() -> None:
    """Call `location` on the next rank over RPC; sum all ranks over Gloo."""
    next_rank = (todist.get_rank() + 1) % todist.get_world_size()
    response = todist.remote_sync_call(location, partitioner=next_rank)
    collectives.init_process_group("gloo")
    total = collectives.all_reduce(todist.get_rank())
    collectives.destroy_process_group()
    print(f"{location()} called {response}; sum of ranks {total}\n", end="")


if __name__ == "__main__":
    main()
