"""A job that crashes in its first start and resumes after the restart.

    torchrun --standalone --nproc_per_node=2 --max-restarts=1 \
        experiments/primitives/restarts.py /tmp/restarts.json

When a process dies, torchrun terminates the others and restarts all of them with an incremented
TORCHELASTIC_RESTART_COUNT. State must therefore be saved in a file. Rank zero writes a temporary
file and renames it, so that a crash never leaves a partial file, and broadcasts the state.
"""

import json
import os
import sys
from pathlib import Path

import metadist as todist
from metadist.distributed import collectives

STEPS = 6
CRASH_AT = 3


def main() -> None:
    """Sum the numbers 0 to STEPS - 1 over all ranks, saving after each."""
    file = Path(sys.argv[1])
    restart_count = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    rank = todist.get_rank()
    collectives.init_process_group("gloo")

    def log(message: str) -> None:
        print(f"restart count {restart_count}, rank {rank}: {message}\n", end="", flush=True)

    state = {"step": 0, "total": 0}
    if rank == 0 and file.exists():
        state = json.loads(file.read_text())
    state = collectives.broadcast(state)
    log(f"starts at step {state['step']}")
    while state["step"] < STEPS:
        state["total"] += collectives.all_reduce(state["step"])
        state["step"] += 1
        if rank == 0:
            temporary = file.with_suffix(".tmp")
            temporary.write_text(json.dumps(state))
            temporary.replace(file)
        collectives.barrier()  # wait until the state is saved
        if restart_count == 0 and rank == todist.get_world_size() - 1 and state["step"] == CRASH_AT:
            log(f"crashes after step {CRASH_AT}")
            os._exit(1)
    log(f"total {state['total']}")
    collectives.destroy_process_group()


if __name__ == "__main__":
    main()
