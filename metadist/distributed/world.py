"""This process's ranks, the world size, and decorators for functions that run on some ranks only.

Each call reads the environment variables.
"""

import functools
import numbers
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, ParamSpec, TypeVar

from metadist.errors import UserError

P = ParamSpec("P")
T = TypeVar("T")

WorkerNameFormat = Callable[[int, int, int, int], str]
"""(world_rank, world_size, local_rank, local_world_size) -> a worker's name."""


def default_worker_name_format(
    world_rank: int, world_size: int, local_rank: int, local_world_size: int
) -> str:
    """`worker0`, `worker1`, …"""
    return f"worker{world_rank}"


_worker_name_format: WorkerNameFormat = default_worker_name_format


def set_worker_name_format(format: WorkerNameFormat) -> None:
    """Set how `WorldInfo.worker_name` names this process.

    `open_transport` and `shutdown_rpc` call it.
    """
    global _worker_name_format
    _worker_name_format = format


class WorldInfo(NamedTuple):
    """The ranks of a process and the world sizes, as torchrun sets them.

    Attributes:
        world_rank: this process's rank among all processes, from 0.
        world_size: the number of processes on all nodes.
        local_rank: this process's rank on its node; it selects the GPU.
        local_world_size: the number of processes on this node.
    """

    world_rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @property
    def rank(self) -> int:
        """The same as `world_rank`."""
        return self.world_rank

    @property
    def worker_name(self) -> str:
        """The name of this process in calls between workers, such as `worker0`."""
        return _worker_name_format(*self)


def get_world_info() -> WorldInfo:
    """This process's ranks, from torchrun's environment variables. Any rank may call it.

    Without the variables (a plain `python script.py`), the world size is 1.

    Raises:
        UserError: the variables are set to invalid or inconsistent values.
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
            "RANK and WORLD_SIZE must both be set to integers "
            f"({error}); start the script with torchrun, which sets them, or unset both."
        ) from None
    if not (0 <= rank < size and 0 <= local_rank < local_size):
        raise UserError(
            f"RANK={rank} of WORLD_SIZE={size} (LOCAL_RANK={local_rank} of "
            f"LOCAL_WORLD_SIZE={local_size}) is out of range: expected ranks from 0 to size - 1."
        )
    return WorldInfo(rank, size, local_rank, local_size)


def get_world_rank() -> int:
    """This process's rank among all processes, from 0."""
    return get_world_info().world_rank


get_rank = get_world_rank


def get_world_size() -> int:
    """The number of processes on all nodes."""
    return get_world_info().world_size


def get_local_rank() -> int:
    """This process's rank on its node, from 0: the index of its GPU."""
    return get_world_info().local_rank


def get_local_world_size() -> int:
    """The number of processes on this node."""
    return get_world_info().local_world_size


def is_single_node() -> bool:
    """Whether every process of the job is known to run on this node.

    Without LOCAL_WORLD_SIZE, only a loopback MASTER_ADDR proves it.
    """
    info = get_world_info()
    if info.world_size == 1:
        return True
    if "LOCAL_WORLD_SIZE" in os.environ:
        return info.world_size == info.local_world_size
    return os.environ.get("MASTER_ADDR") in ("localhost", "127.0.0.1", "::1")


def restart_count() -> int:
    """The number of times that torchrun's agent on this node has restarted its workers."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def host_name() -> str:
    """The name of this process's machine."""
    return socket.gethostname()


def launched_by_torchrun() -> bool:
    """Whether this process has the variables of a worker of torchrun; see `parent_is_agent`."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def parent_is_agent() -> bool:
    """Whether this process's parent is torchrun's agent, as far as /proc tells.

    A process that a worker starts has the worker's environment variables, too.
    """
    try:
        command = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    except OSError:
        return False
    is_torchrun = b"torch.distributed.run" in command or b"torchrun" in command
    return launched_by_torchrun() and is_torchrun


def usable_cpus() -> int:
    """The number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _on_ranks_where(
    includes: Callable[[int], bool],
) -> Callable[[Callable[P, T]], Callable[P, T | None]]:
    def decorate(function: Callable[P, T]) -> Callable[P, T | None]:
        @functools.wraps(function)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> T | None:
            return function(*args, **kwargs) if includes(get_world_rank()) else None

        return guarded

    return decorate


def _require_ranks(ranks: tuple[object, ...]) -> None:
    for rank in ranks:
        if not isinstance(rank, numbers.Integral):
            raise TypeError(f"ranks must be integers, as in @on_rank(0, 1), got {rank!r:.80}.")


def on_rank(*ranks: int) -> Callable[[Callable[P, T]], Callable[P, T | None]]:
    """Decorator: the function runs on `ranks` and returns None on all others.

    Raises:
        TypeError: a rank is not an integer, as in `@on_rank` without ranks.
    """
    _require_ranks(ranks)
    return _on_ranks_where(lambda rank: rank in ranks)


def not_on_rank(*ranks: int) -> Callable[[Callable[P, T]], Callable[P, T | None]]:
    """Decorator: the function runs on all ranks except `ranks`, where it returns None.

    Raises:
        TypeError: a rank is not an integer.
    """
    _require_ranks(ranks)
    return _on_ranks_where(lambda rank: rank not in ranks)


def rank_zero_only(function: Callable[P, T]) -> Callable[P, T | None]:
    """Decorator: the function runs on rank zero and returns None on all others."""
    return on_rank(0)(function)


def rank_non_zero_only(function: Callable[P, T]) -> Callable[P, T | None]:
    """Decorator: the function runs on all ranks except zero, where it returns None."""
    return not_on_rank(0)(function)
