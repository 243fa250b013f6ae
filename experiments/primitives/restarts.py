"""A job that crashes on its first attempt and goes on from where it was on its second.

    torchrun --standalone --nproc_per_node=2 --max-restarts=1 \
        experiments/primitives/restarts.py /tmp/restarts.json

When one process dies, torchrun ends the others and starts all of them anew, with
TORCHELASTIC_RESTART_COUNT one higher. Their memory is gone: what shall outlive a crash must be in
a file. Rank zero writes it, first beside its place and then renamed, so that no crash leaves half
a file; every rank learns from rank zero where to go on.
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
    """Add up the numbers 0 to STEPS - 1 of every rank, saving after each."""
    file = Path(sys.argv[1])
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    rank = todist.get_rank()
    collectives.init_process_group("gloo")

    def say(what: str) -> None:
        print(f"attempt {attempt}, rank {rank}: {what}\n", end="", flush=True)

    state = {"step": 0, "total": 0}
    if rank == 0 and file.exists():
        state = json.loads(file.read_text())
    state = collectives.broadcast(state)
    say(f"begins at step {state['step']}")
    while state["step"] < STEPS:
        state["total"] += collectives.all_reduce(state["step"])
        state["step"] += 1
        if rank == 0:
            draft = file.with_suffix(".draft")
            draft.write_text(json.dumps(state))
            draft.replace(file)
        collectives.barrier()  # saved, before anyone goes on
        if attempt == 0 and rank == todist.get_world_size() - 1 and state["step"] == CRASH_AT:
            say(f"crashes after step {CRASH_AT}")
            os._exit(1)
    say(f"total {state['total']}")
    collectives.destroy_process_group()


if __name__ == "__main__":
    main()
