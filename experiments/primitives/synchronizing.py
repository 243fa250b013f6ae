"""Tasks of unequal length, in step and out of step.

    torchrun --standalone --nproc_per_node=2 experiments/primitives/synchronizing.py
    torchrun --standalone --nproc_per_node=2 experiments/primitives/synchronizing.py --barrier

Rank r needs (r + 1) units of time for each task. Without a barrier the quick ranks begin the
second task while the slow ones are in the first; with it nobody begins before all have ended.
"""

import argparse
import time

import metadist as todist
from metadist.distributed import collectives


def main() -> None:
    """Run two tasks, and after each one wait for the others if so asked."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--barrier", action="store_true", help="wait for the others")
    parser.add_argument("--unit", type=float, default=0.3, help="seconds")
    arguments = parser.parse_args()
    rank = todist.get_rank()

    collectives.init_process_group("gloo")
    collectives.barrier()  # the clocks of all ranks start together
    start = time.monotonic()

    def say(what: str) -> None:
        print(f"{time.monotonic() - start:.1f} s: rank {rank} {what} task\n", end="", flush=True)

    for task in ("first", "second"):
        say(f"begins the {task}")
        time.sleep((rank + 1) * arguments.unit)
        say(f"ends the {task}")
        if arguments.barrier:
            collectives.barrier()
    collectives.destroy_process_group()


if __name__ == "__main__":
    main()
