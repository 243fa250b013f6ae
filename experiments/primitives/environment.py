"""The environment variables that torchrun sets, and metadist's view of them.

    python experiments/primitives/environment.py
    torchrun --standalone --nproc_per_node=3 experiments/primitives/environment.py

RANK is the index over all nodes and selects the process's share of the work; LOCAL_RANK is the
index on a node and selects its GPU.
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
    """Print the variables with a single write, so that the lines of a rank stay together."""
    info = todist.get_world_info()
    lines = [f"[{info.rank}] {name}={os.environ.get(name, '(not set)')}" for name in NAMES]
    items = list(range(10))[info.rank :: info.world_size]
    lines += [f"[{info.rank}] {info}", f"[{info.rank}] share of ten items: {items}"]
    print("".join(f"{line}\n" for line in lines), end="")


if __name__ == "__main__":
    main()
