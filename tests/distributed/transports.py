"""A transport without other processes, for tests of what uses a transport."""

from typing import Any

import torch.distributed as dist
from torch.futures import Future

from metadist.distributed.transport import Request


class InProcess:
    """Runs every request at once in the calling process, and answers every ping."""

    ping_timeout = 1.0
    timeout = 300.0
    carries_devices = records_autograd = False

    def __init__(self, *names: str) -> None:
        self.names = list(names)
        self.store: dist.Store = dist.HashStore()
        self.pinged: list[str] = []

    def open(self) -> None: ...

    def close(self, graceful: bool) -> None: ...

    def send(self, worker: str, request: Request, timeout: float | None) -> Future:
        return completed(request.respond())

    def ping(self, worker: str) -> Future:
        self.pinged.append(worker)
        return completed(None)

    def is_timeout(self, error: Exception) -> bool:
        return "timed out" in str(error)


def completed(outcome: Any) -> Future:
    """A future of a result, or of an exception."""
    future: Future = Future()
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
    return future
