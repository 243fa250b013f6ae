"""What torchrun tells each process, as it lies in the environment and as metadist reads it.

    python experiments/primitives/environment.py
    torchrun --standalone --nproc_per_node=3 experiments/primitives/environment.py

RANK counts over all nodes and says which share of the work is whose; LOCAL_RANK counts on one
node and says whose GPU is whose.
"""

import os

import metadist as todist

NAMES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
)


def main() -> None:
    """Print the variables in one piece, so that the ranks' lines stay together."""
    info = todist.get_world_info()
    lines = [f"[{info.rank}] {name}={os.environ.get(name, '(not set)')}" for name in NAMES]
    items = list(range(10))[info.rank :: info.world_size]
    lines += [f"[{info.rank}] {info}", f"[{info.rank}] its share of ten items: {items}"]
    print("".join(f"{line}\n" for line in lines), end="")


if __name__ == "__main__":
    main()
