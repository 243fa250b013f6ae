"""How a worker takes visits in: on threads of its own, beside those that serve the network."""

import threading
from concurrent.futures import ThreadPoolExecutor

from torch.distributed import rpc
from torch.futures import Future

from metadist.distributed.visits import Visit
from metadist.distributed.workers import number_of_threads

# A visit may wait for visits that it causes, to any depth, so none may wait for a free thread:
# there is no bound but the machine's. How many visits are under way is in the callers' hands: a
# call is one visit to a worker, however many shards it has. Visits that come one after the other
# get the same thread, and with it the memory that the one before has left; the agent's threads
# take turns, and each would keep some.
_threads = ThreadPoolExecutor(max_workers=1 << 16, thread_name_prefix="metadist-visit")


class _Places:
    """Room for visits on the agent's own threads: a change of threads would take as long as what
    a call that asks one worker for a little does there. Most threads stay free for the network.
    """

    def __init__(self) -> None:
        self._taken = 0
        self._lock = threading.Lock()

    def acquire(self) -> bool:
        """Take a place; whether there was one."""
        with self._lock:
            there = self._taken < number_of_threads() // _SHARE
            self._taken += there
        return there

    def release(self) -> None:
        """Give it back."""
        with self._lock:
            self._taken -= 1


_SHARE = 4
"""One of so many of the agent's threads runs visits."""

_places = _Places()


@rpc.functions.async_execution
def receive(visit: Visit) -> Future:
    """What a call runs on a worker: the visit's answers, in a future.

    A distributed autograd context belongs to the thread it came in on, one of the agent's. There
    are 256 of them, and so many visits of contexts can be under way on a worker at once: with
    more that wait for each other, all wait until their timeout.
    """
    future: Future = Future()
    if visit.in_context:
        future.set_result(visit.answer())
    elif visit.alone and _places.acquire():
        try:
            future.set_result(visit.answer())
        finally:
            _places.release()
    else:
        _threads.submit(lambda: future.set_result(visit.answer()))
    return future
