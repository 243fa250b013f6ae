"""Tasks of unequal duration, with and without a barrier.

    torchrun --standalone --nproc_per_node=2 experiments/primitives/barrier.py
    torchrun --standalone --nproc_per_node=2 experiments/primitives/barrier.py --barrier

Rank r needs (r + 1) units of time per task. Without a barrier, fast ranks start the second task
while slow ranks are in the first; with it, no rank starts before all have finished the first.
"""

import argparse
import time

import metadist as todist
from metadist.distributed import collectives


def main() -> None:
    """Run two tasks; with --barrier, wait for the other ranks after each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--barrier", action="store_true", help="wait for the other ranks")
    parser.add_argument("--unit", type=float, default=0.3, help="seconds")
    arguments = parser.parse_args()
    rank = todist.get_rank()

    collectives.init_process_group("gloo")
    collectives.barrier()  # a common start time
    start = time.monotonic()

    def log(event: str) -> None:
        print(f"{time.monotonic() - start:.1f} s: rank {rank} {event} task\n", end="", flush=True)

    for task in ("first", "second"):
        log(f"starts the {task}")
        time.sleep((rank + 1) * arguments.unit)
        log(f"ends the {task}")
        if arguments.barrier:
            collectives.barrier()
    collectives.destroy_process_group()


if __name__ == "__main__":
    main()
