"""What torchrun does: it starts this file several times, and each copy learns its number.

    python experiments/primitives/hello_world.py
    torchrun --standalone --nproc_per_node=2 experiments/primitives/hello_world.py

Nothing is imported from PyTorch: torchrun only sets environment variables. The copies run at once
and share the terminal, so their lines come in any order. torchrun starts Python unbuffered, where
`print` writes a line and its end one after the other: here both go in one piece, so that no other
copy's line comes between them.
"""

import os


def main() -> None:
    """Greet, with this copy's place if torchrun gave it one."""
    rank, size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    place = f"rank {rank} of {size}" if rank is not None else "a process on its own"
    print(f"Hello from {place} (process {os.getpid()})\n", end="")


if __name__ == "__main__":
    main()
