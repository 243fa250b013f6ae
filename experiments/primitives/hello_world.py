"""torchrun starts this script in several processes and tells each its rank.

    python experiments/primitives/hello_world.py
    torchrun --standalone --nproc_per_node=2 experiments/primitives/hello_world.py

PyTorch is not imported: torchrun only sets environment variables. The processes share the terminal,
so their lines appear in any order. torchrun starts Python unbuffered, where `print` writes a line
and its newline separately; here both are one write, so that lines do not interleave.
"""

import os


def main() -> None:
    """Print the rank, if torchrun has set it."""
    rank, size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    name = f"rank {rank} of {size}" if rank is not None else "a single process"
    print(f"Hello from {name} (process {os.getpid()})\n", end="")


if __name__ == "__main__":
    main()
