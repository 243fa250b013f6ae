"""The workers of the RPC world that is open: their names, and whether they still answer."""

import contextlib

from torch.distributed import rpc

from metadist.distributed.job import current_job
from metadist.distributed.lost import PeerLost
from metadist.distributed.world import default_worker_name_format, get_world_info
from metadist.errors import UserError

HEARTBEAT_SECONDS = 1.0
"""How often a waiting worker asks whether the one it waits for still answers."""

ANSWER_SECONDS = 30.0
"""How long a peer may leave such a question unanswered before it counts as lost, unless
`init_rpc` says otherwise."""

_answer_seconds = ANSWER_SECONDS


def rpc_is_initialized() -> bool:
    """Whether this process is in an RPC world at the moment."""
    return bool(rpc._is_current_rpc_agent_set())


def worker_names() -> list[str]:
    """The names of all workers, in the order of their ranks."""
    agent = rpc.api._get_current_rpc_agent()
    return [info.name for info in sorted(agent.get_worker_infos(), key=lambda info: info.id)]


def has_device_maps() -> bool:
    """Whether the world was opened with device maps, so that GPU tensors may cross as they are."""
    return bool(rpc.api._get_current_rpc_agent()._get_backend_options().device_maps)


def number_of_threads() -> int:
    """How many threads of this process serve the network."""
    return rpc.api._get_current_rpc_agent()._get_backend_options().num_worker_threads


def get_worker_id(id: str | int | None = None) -> int:
    """The number of a worker: its rank.

    Args:
        id: a worker's name or number; None for this process.

    Raises:
        UserError: there is no such worker.
    """
    if id is None:
        return get_world_info().rank
    size = get_world_info().world_size
    if isinstance(id, int):
        if not 0 <= id < size:
            raise UserError(f"there is no worker {id} in a world of {size}: take 0 to {size - 1}.")
        return id
    if rpc_is_initialized():
        names = worker_names()
    else:
        names = [default_worker_name_format(rank, size, 0, 1) for rank in range(size)]
    if id not in names:
        raise UserError(f"there is no worker named {id!r}: the world has {', '.join(names)}.")
    return names.index(id)


def place_of(name: str) -> str:
    """A worker's name with its rank and, where a job has told it, its machine, for messages."""
    with contextlib.suppress(RuntimeError, ValueError):
        rank = worker_names().index(name)
        hosts = current_job().hosts
        where = f" on {hosts[rank]}" if rank < len(hosts) else ""
        return f"{name} (rank {rank}{where})"
    return name


def set_patience(seconds: float) -> None:
    """How long the workers of the world that opens now may leave a heartbeat unanswered."""
    global _answer_seconds
    _answer_seconds = seconds


def require_answers(names: list[str]) -> None:
    """Ask workers whether they are there; raises `PeerLost` for one that does not answer."""
    questions = [(name, rpc.rpc_async(name, _answer, timeout=_answer_seconds)) for name in names]
    for name, question in questions:
        try:
            question.wait()
        except RuntimeError as error:
            raise PeerLost(
                f"{place_of(name)} does not answer any more ({first_line(error)})."
            ) from None


def _answer() -> None:
    """What a heartbeat calls."""


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its kind."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
