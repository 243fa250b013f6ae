"""Starts a world without torchrun: python -m faults.by_hand RANKS SCRIPT ARGUMENTS…

Each process gets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as under `mpirun` or `srun`.
"""

import os
import socket
import subprocess
import sys


def main() -> int:
    """Start the processes and wait for them; the first exit status that is not zero."""
    ranks = int(sys.argv[1])
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    world = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            [sys.executable, *sys.argv[2:]], env={**os.environ, **world, "RANK": str(rank)}
        )
        for rank in range(ranks)
    ]
    return next(filter(None, [process.wait() for process in processes]), 0)


if __name__ == "__main__":
    sys.exit(main())
