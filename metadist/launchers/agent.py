"""torchrun's agent, where it cannot end by itself."""

import os
import subprocess
from pathlib import Path

from metadist.distributed.world import launched_by_torchrun

_PATIENCE_SECONDS = 6

_WATCH = """
for _ in $(seq {steps}); do
    sleep 0.5
    [ "$(cut -d ' ' -f 22 /proc/{pid}/stat 2> /dev/null)" = "{born}" ] || exit 0
done
kill -KILL {pid}
"""


def end_stuck_agent() -> None:
    """See that the agent that started this process ends within seconds of it. Any rank.

    It is for a machine that has lost the network to the rendezvous: the agent then waits in its
    connection, deaf to signals, for as long as the kernel goes on trying, a quarter of an hour.
    Where there is no agent, or no /proc to know it by, nothing happens.
    """
    pid = os.getppid()
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
        born = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return
    if not launched_by_torchrun() or not (
        b"torch.distributed.run" in words or b"torchrun" in words
    ):
        return
    watch = _WATCH.format(steps=2 * _PATIENCE_SECONDS, pid=pid, born=born)
    subprocess.Popen(
        ["sh", "-c", watch],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
