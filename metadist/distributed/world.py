"""Which process this is among how many: the world, read from the environment when asked."""

import os
import socket
from collections.abc import Callable
from typing import NamedTuple

from metadist.errors import UserError


class WorldInfo(NamedTuple):
    """A process's place in its world, as torchrun numbers it.

    Attributes:
        world_rank: this process's number among all, from 0.
        world_size: how many processes there are on all nodes.
        local_rank: this process's number on its node; it picks the GPU.
        local_world_size: how many processes there are on this node.
    """

    world_rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @property
    def rank(self) -> int:
        """The same as `world_rank`."""
        return self.world_rank


WorkerNameFormat = Callable[[int, int, int, int], str]
"""(world_rank, world_size, local_rank, local_world_size) -> an RPC worker's name."""


def default_worker_name_format(
    world_rank: int, world_size: int, local_rank: int, local_world_size: int
) -> str:
    """`worker0`, `worker1`, …"""
    return f"worker{world_rank}"


def get_world_info() -> WorldInfo:
    """This process's place in the world, from torchrun's environment variables.

    Without them (a plain `python script.py`) the process is a world of its own. Any rank.

    Raises:
        UserError: the variables are there but make no sense together.
    """
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return WorldInfo(0, 1, 0, 1)
    try:
        rank = int(os.environ["RANK"])
        size = int(os.environ["WORLD_SIZE"])
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    except (KeyError, ValueError) as error:
        raise UserError(
            "RANK and WORLD_SIZE must both be set to whole numbers for a process of a world "
            f"({error}); start the script with torchrun, which sets them, or unset both."
        ) from None
    if not (0 <= rank < size and 0 <= local_rank < local_size):
        raise UserError(
            f"RANK={rank} of WORLD_SIZE={size} (LOCAL_RANK={local_rank} of "
            f"LOCAL_WORLD_SIZE={local_size}) is no place in a world: ranks go from 0 to size - 1."
        )
    return WorldInfo(rank, size, local_rank, local_size)


def get_world_rank() -> int:
    """This process's number among all processes of the world, from 0."""
    return get_world_info().world_rank


get_rank = get_world_rank


def get_world_size() -> int:
    """How many processes the world has, on all nodes together."""
    return get_world_info().world_size


def get_local_rank() -> int:
    """This process's number on its node, from 0: the number of its GPU."""
    return get_world_info().local_rank


def get_local_world_size() -> int:
    """How many processes of the world run on this node."""
    return get_world_info().local_world_size


def is_single_node() -> bool:
    """Whether every process of the world is known to run on this node.

    Launchers that set RANK and WORLD_SIZE alone say nothing of nodes; then only a loopback
    MASTER_ADDR tells.
    """
    info = get_world_info()
    if info.world_size == 1:
        return True
    if "LOCAL_WORLD_SIZE" in os.environ:
        return info.world_size == info.local_world_size
    return os.environ.get("MASTER_ADDR") in ("localhost", "127.0.0.1", "::1")


def attempt() -> int:
    """How often torchrun's agent on this node has restarted its processes (0 at first)."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def host_name() -> str:
    """The name of the machine that this process runs on."""
    return socket.gethostname()


def launched_by_torchrun() -> bool:
    """Whether torchrun's agent started this process, and is its parent."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def usable_cpus() -> int:
    """How many CPUs this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
