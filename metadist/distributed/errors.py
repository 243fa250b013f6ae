"""Errors of a distributed job."""

import contextlib
from collections.abc import Iterator

import torch.distributed as dist

from metadist.errors import first_line


class WorkerLostError(ConnectionError):
    """Another process of the job died, froze or cannot be reached.

    Attributes:
        rank: the lost process's rank; None where it is not known.
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank

    def __reduce__(self) -> tuple:
        return type(self), (str(self), self.rank)


class RendezvousTimeoutError(WorkerLostError, TimeoutError):
    """A process of the job did not reach a rendezvous in time."""


class RendezvousClosedError(RendezvousTimeoutError):
    """Rank zero closed a rendezvous because ranks are missing, and reports which ones."""


_LOST_CONNECTION = ("broken pipe", "connection closed", "connection refused", "connection reset")
_LOST_BY_BACKEND = (
    "abort",
    "connect",
    "internal error",
    "pair closure",
    "remote error",
    "remote process",
    "socket",
    "system error",
    "timed out",
    "timeout",
)
"""Parts of Gloo's and NCCL's connection errors. Errors of invalid calls contain none of them."""


@contextlib.contextmanager
def connection_errors_as_worker_lost(
    message: str = "a rank left or stopped during a collective", advice: str = ""
) -> Iterator[None]:
    """Raise Gloo's and NCCL's connection errors as `WorkerLostError`, any other error as it is.

    A collective does not report which rank was lost: `rank` is then None.

    Args:
        message: the text before the error's first line.
        advice: the text after it, from ": " on; "" for none.
    """
    try:
        yield
    except RuntimeError as error:
        text = str(error).lower()
        is_lost = isinstance(error, dist.DistNetworkError) or any(
            phrase in text for phrase in _LOST_CONNECTION
        )
        if "gloo" in text or "nccl" in text:
            is_lost = is_lost or any(phrase in text for phrase in _LOST_BY_BACKEND)
        if not is_lost:
            raise
        raise WorkerLostError(f"{message} ({first_line(error)}){advice or '.'}") from None
