"""Requests to several workers, sent over a tree of workers.

The caller sends messages to at most `fanout` other workers. If there are more, they are split into
`fanout` groups: the first worker of a group receives the requests of the whole group and forwards
the others in the same way. Sums are added up on the way back. With W workers the caller then sends
and receives `fanout` messages instead of W, and the longest path has log W / log `fanout` workers.
Objects that the requests share, such as a model, are pickled once for each message.
"""

import functools
import math
import queue
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch.futures import Future

from metadist.distributed.errors import WorkerLostError
from metadist.distributed.partitioners import balanced_bounds
from metadist.distributed.responses import (
    RemoteFailure,
    WorkerResponse,
    remote_failure,
    sum_responses,
)
from metadist.distributed.transport import (
    MAX_TIMEOUT,
    PING_INTERVAL,
    Request,
    current_transport,
    describe_worker,
    require_alive,
)
from metadist.distributed.worker_request import WorkerRequest
from metadist.distributed.world import get_rank
from metadist.errors import UserError, first_line

FANOUT = 8
"""The default number of workers that a worker sends requests to. For W workers about
fanout · log W / log fanout messages are sent one after the other. With 8 this is 1.4 times the
minimum (at 3), whose additional levels would add latency. Up to 9 workers are all called
directly."""


class RemoteError(RuntimeError):
    """A function raised on another worker, or its result could not be transferred.

    Attributes:
        worker: the worker's name.
        remote_traceback: the traceback on the worker, as text; "" if there is none.
        failure: the worker's response.
    """

    def __init__(self, worker: str, failure: RemoteFailure) -> None:
        raised = ": ".join(filter(None, (failure.kind, failure.message)))
        text = f"{worker}{failure.where} raised {raised}"
        if failure.traceback:
            text += f"\n--- traceback on {worker} ---\n{failure.traceback.rstrip()}"
        super().__init__(text)
        self.worker = worker
        self.remote_traceback = failure.traceback
        self.failure = failure

    def __reduce__(self) -> tuple:
        return RemoteError, (self.worker, self.failure)


@dataclass(frozen=True)
class SubtreeRequest:
    """The requests for a worker and for the workers below it in the tree.

    Attributes:
        requests: the workers' names and requests.
        fanout: the number of workers that a worker sends to.
        timeout: the timeout of each request; see `Transport.send`.
    """

    requests: Sequence[tuple[str, WorkerRequest]]
    fanout: int
    timeout: float | None

    anchor: ClassVar[None] = None

    @property
    def keep_device(self) -> bool:
        """Whether the requests' responses may have tensors on other devices than the CPU."""
        return self.requests[0][1].keep_device

    def respond(self) -> list[list[WorkerResponse]] | RemoteFailure:
        """The responses to the requests, in their order; with weights, one sum of all of them.

        An exception becomes a `RemoteFailure` that says where it was raised.
        """
        try:
            requests = Requests(self.requests, self.fanout)
            requests.send(self.timeout)
            responses = requests.wait()
            if self.requests[0][1].weights is None:
                return responses
            parts = [part for (part,) in responses]
            return [[sum_responses(iter(parts), [1] * len(parts))]]
        except RemoteError as error:
            return error.failure._replace(worker=error.worker)
        except WorkerLostError as error:
            return remote_failure(error)._replace(lost_rank=error.rank)
        except TimeoutError as error:
            return remote_failure(error)._replace(timed_out=True)
        except BaseException as error:
            return remote_failure(error)


class Requests:
    """Requests to several workers, one for each.

    Args:
        requests: the workers' names and requests.
        fanout: the number of workers that a worker sends to; None to send all requests from here.
            With a fanout, requests for sums must differentiate with respect to the same tensors in
            the same order.

    Attributes:
        futures: the futures of the messages that were sent.
    """

    def __init__(self, requests: Sequence[tuple[str, WorkerRequest]], fanout: int | None) -> None:
        self._requests, self._fanout = requests, fanout
        self._transport = current_transport()
        self._own = self._transport.names[get_rank()]
        remote = [i for i, (worker, _) in enumerate(requests) if worker != self._own]
        local = [i for i, (worker, _) in enumerate(requests) if worker == self._own]
        # The request to this process comes last, since its computation would delay the others.
        self._groups = [[i] for i in remote + local]
        if fanout is not None and len(remote) > fanout:
            bounds = balanced_bounds(len(remote), fanout)
            self._groups = [remote[start:stop] for start, stop in bounds] + [[i] for i in local]
        self._receivers = [requests[group[0]][0] for group in self._groups]
        self.futures: list[Future] = []
        self._seconds = 0.0
        self._deadline = math.inf

    def send(self, timeout: float | None) -> None:
        """Send all requests.

        Args:
            timeout: the timeout of each message; see `Transport.send`.

        Raises:
            pickle.PicklingError: a request cannot be pickled. The messages before it were sent.
        """
        self._seconds = self._transport.timeout if timeout is None else timeout
        limited = 0 < self._seconds <= MAX_TIMEOUT
        self._deadline = time.monotonic() + self._seconds if limited else math.inf
        for receiver, group in zip(self._receivers, self._groups, strict=True):
            message: Request = self._requests[group[0]][1]
            if self._fanout is not None and len(group) > 1:
                message = SubtreeRequest([self._requests[i] for i in group], self._fanout, timeout)
            self.futures.append(self._transport.send(receiver, message, timeout))

    def wait(self) -> list[list[WorkerResponse]]:
        """Wait for the responses to the requests, in their order; with weights, one per message.

        The first failure ends the wait; later responses are dropped.

        Raises:
            RemoteError: a function raised.
            UserError: a function raised this error.
            WorkerLostError: a worker died or does not answer.
            TimeoutError: a worker did not respond in time.
        """
        finished: queue.SimpleQueue[int] = queue.SimpleQueue()
        for index, future in enumerate(self.futures):
            future.add_done_callback(functools.partial(_put, finished, index))
        responses: dict[int, list[list[WorkerResponse]]] = {}
        while len(responses) < len(self.futures):
            seconds_left = max(0.0, self._deadline - time.monotonic())
            try:
                index = finished.get(timeout=min(PING_INTERVAL, seconds_left))
            except queue.Empty:
                pending = [i for i in range(len(self.futures)) if i not in responses]
                if time.monotonic() >= self._deadline:
                    raise self._timeout_error(pending[0]) from None
                receivers = sorted({self._receivers[i] for i in pending} - {self._own})
                require_alive(receivers, self._deadline)
                continue
            responses[index] = self._responses(index)
        by_request: dict[int, list[WorkerResponse]] = {}
        for index, group in enumerate(self._groups):
            # The sum of a group's requests takes the place of its first one.
            by_request.update(zip(group, responses[index], strict=False))
        return [by_request[index] for index in sorted(by_request)]

    def _responses(self, index: int) -> list[list[WorkerResponse]]:
        """The responses to a message whose future is done."""
        worker, below = self._receivers[index], len(self._groups[index]) - 1
        try:
            response = self.futures[index].wait()
            if isinstance(response, AttributeError):  # RPC returns it instead of raising it
                raise response
        except Exception as error:
            if self._transport.is_timeout(error):
                raise self._timeout_error(index) from None
            try:
                require_alive([worker])
            except WorkerLostError as lost_error:
                raise WorkerLostError(
                    f"{describe_worker(worker)} was lost during a call: {first_line(error)}",
                    lost_error.rank,
                ) from None
            # The worker is alive, so the arguments or the result could not be transferred.
            message = f"its arguments or its result cannot be transferred: {first_line(error)}"
            location = describe_worker(worker).removeprefix(worker)
            response = RemoteFailure(type(error).__name__, message, "", False, location)
        if isinstance(response, RemoteFailure):
            if response.of_user:
                raise UserError(response.message)
            if response.timed_out:
                raise TimeoutError(response.message)
            if response.lost_rank is not None:
                raise WorkerLostError(response.message, response.lost_rank)
            raise RemoteError(response.worker or worker, response)
        return response if below else [response]

    def _timeout_error(self, index: int) -> TimeoutError:
        below = len(self._groups[index]) - 1
        subtree = f" or one of the {below} below it" if below else ""
        return TimeoutError(
            f"{describe_worker(self._receivers[index])}{subtree} did not respond within "
            f"{self._seconds:g} s: set a longer timeout, which is strategy.call_timeout in a run."
        )


def _put(finished: queue.SimpleQueue[int], index: int, _: Future) -> None:
    finished.put(index)
