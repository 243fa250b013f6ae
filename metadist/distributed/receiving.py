"""How a worker takes visits in: on threads of its own, beside those that serve the network."""

from concurrent.futures import ThreadPoolExecutor

from torch.distributed import rpc
from torch.futures import Future

from metadist.distributed.visits import Visit

# A visit may wait for visits that it causes, to any depth, so none may wait for a free thread:
# there is no bound but the machine's. How many visits are under way is in the callers' hands: a
# call is one visit to a worker, however many shards it has. Visits that come one after the other
# get the same thread, and with it the memory that the one before has left; the agent's threads
# take turns, and each would keep some.
_threads = ThreadPoolExecutor(max_workers=1 << 16, thread_name_prefix="metadist-visit")


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
    else:
        _threads.submit(lambda: future.set_result(visit.answer()))
    return future
