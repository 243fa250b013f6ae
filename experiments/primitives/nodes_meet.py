"""Which node a rank is on, and a call from each rank to the next: `several_nodes.sh` runs it.

    experiments/primitives/several_nodes.sh

On one node it runs as well: torchrun --standalone --nproc_per_node=2 …/nodes_meet.py
"""

import os

import metadist as todist
from metadist.distributed import collectives


def place() -> str:
    """Where this function runs."""
    info = todist.get_world_info()
    node = os.environ.get("GROUP_RANK", "0")
    return f"rank {info.rank} of {info.world_size} (node {node}, local rank {info.local_rank})"


@todist.auto_init_rpc()
def main() -> None:
    """Ask the next rank where it is, over RPC; then add all ranks up, over Gloo."""
    next_rank = (todist.get_rank() + 1) % todist.get_world_size()
    answer = todist.remote_sync_call(place, partitioner=next_rank)
    collectives.init_process_group("gloo")
    total = collectives.all_reduce(todist.get_rank())
    collectives.destroy_process_group()
    print(f"{place()} called {answer}; sum of ranks {total}\n", end="")


if __name__ == "__main__":
    main()
