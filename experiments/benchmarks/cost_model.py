"""Cost model of a training step, fitted to measured steps.

With W workers, T tasks per meta-batch and P parameters, in seconds:

    compute      k·(b0 + b1·√P + b2·P)·(1 + m·(w-1)), k = ⌈T/W⌉ tasks on the busiest worker, w
                 workers on its machine: feature maps grow as √P, matrix products as P, and
                 workers on one machine share its memory bandwidth
    outer step   a0 + a1·P
    rpc          L·r0 + M·(r1 + r2·P): requests take L levels of workers, and M messages with the
                 parameters, and M with gradients, follow one another on the way to the last worker
    allreduce    s0 + s1·P + D·s2 + V·s3·P: an all-reduce of float64 copies takes D messages one
                 after the other (its depth) and transfers the vector V times
    local        0

r1 and s2 are latencies, 1/r2 and 1/s3 bandwidths in parameters per second. Up to nine workers, rank
zero sends to each in turn: L = 1, M = W. To more workers it sends over a tree
(metadist/distributed/requests.py). A ring of W has
D = 2·(W-1) and V = 2·(W-1)/W. From nine workers on, the all-reduce has several levels
(metadist/distributed/hierarchy.py): in each level but the last, groups of g workers reduce to one
(D = g, V = 2·(g-1)/g), and it sends them the sum in the end (D = V = ⌈log2 g⌉); the last is a ring.
"""

import bisect
import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls

from metadist.distributed.hierarchy import FLAT_UP_TO, plan_levels
from metadist.distributed.requests import FANOUT

STRATEGIES = ("local", "rpc", "allreduce")
"""The strategies that are measured. The model also has "flat", an all-reduce in one ring for any
number of workers, and "direct", rpc where rank zero sends to each worker itself."""

MOST_WORKERS = 10**6
"""If no number of workers up to this makes communication longer than the tasks, none does."""


class Step(NamedTuple):
    """A measured step.

    Attributes:
        strategy: one of `STRATEGIES`.
        workers: W.
        tasks: T; 0 for communication only.
        parameters: P.
        seconds: the median.
    """

    strategy: str
    workers: int
    tasks: int
    parameters: int
    seconds: float


class Costs(NamedTuple):
    """The fitted coefficients, all non-negative."""

    compute: tuple[float, float, float]
    outer: tuple[float, float]
    rpc: tuple[float, float, float]
    allreduce: tuple[float, float, float, float]
    sharing: float = 0.0

    def computation(self, tasks: int, parameters: int) -> float:
        """Seconds of computation for `tasks` tasks of a worker that is alone on its machine."""
        fixed, root, linear = self.compute
        return tasks * (fixed + root * math.sqrt(parameters) + linear * parameters)

    def messages(self, strategy: str, workers: int, parameters: int) -> float:
        """Seconds of communication."""
        if strategy == "local":
            return 0.0
        coefficients = self.rpc if strategy in ("rpc", "direct") else self.allreduce
        terms = _terms(strategy, workers, parameters)
        return sum(cost * term for cost, term in zip(coefficients, terms, strict=True))

    def step(
        self, strategy: str, workers: int, tasks: int, parameters: int, cores: float = math.inf
    ) -> float:
        """Seconds of a complete step.

        Args:
            strategy: one of `STRATEGIES`.
            workers: W.
            tasks: T, the tasks of the whole meta-batch.
            parameters: P.
            cores: the cores of the one machine that all workers share; with fewer cores than
                workers, computation is slower. Infinity: each worker has its own machine.
        """
        busiest = self.computation(math.ceil(tasks / workers), parameters)
        if cores < math.inf:
            busiest *= max(1.0, workers / cores) * (1 + self.sharing * (min(workers, cores) - 1))
        return (
            busiest
            + self.outer[0]
            + self.outer[1] * parameters
            + self.messages(strategy, workers, parameters)
        )

    def communication_limit(self, tasks_per_worker: int, parameters: int) -> float:
        """The number of workers from which on rpc's communication takes longer than the tasks."""
        numbers = range(1, MOST_WORKERS + 1)
        available = self.computation(tasks_per_worker, parameters)
        index = bisect.bisect(
            numbers, available, key=lambda workers: self.messages("rpc", workers, parameters)
        )
        return numbers[index] if index < MOST_WORKERS else math.inf


class Path(NamedTuple):
    """The longest path of a step's communication.

    Attributes:
        depth: the number of messages one after the other, or of levels of a tree.
        volume: the number of times that the whole vector is transferred.
    """

    depth: float
    volume: float


def rpc_path(workers: int, fanout: float = FANOUT) -> Path:
    """The path of requests to all workers, including the caller.

    Args:
        workers: W.
        fanout: see `RpcStrategy`; infinity: the caller sends to each worker.
    """
    if workers - 1 <= fanout:
        return Path(1, workers)
    below = rpc_path(math.ceil((workers - 1) / fanout), fanout)
    return Path(1 + below.depth, 1 + fanout + below.volume)


def all_reduce_path(workers: int, flat_up_to: float = FLAT_UP_TO) -> Path:
    """The path of an all-reduce of workers on one machine each.

    Args:
        workers: W.
        flat_up_to: see `AllReduceStrategy`; infinity: always a ring.
    """
    ring = workers
    depth = volume = 0.0
    if workers > flat_up_to:
        *below, (top,) = plan_levels([*map(str, range(workers))], int(flat_up_to))
        ring = len(top)
        for groups in below:
            size = max(map(len, groups))
            spread = math.ceil(math.log2(size))
            depth += size + spread
            volume += 2 * (size - 1) / size + spread
    return Path(depth + 2 * (ring - 1), volume + 2 * (ring - 1) / ring)


def _terms(strategy: str, workers: int, parameters: int) -> tuple[float, ...]:
    if strategy in ("rpc", "direct"):
        levels, messages = rpc_path(workers, FANOUT if strategy == "rpc" else math.inf)
        return levels, messages, messages * parameters
    path = all_reduce_path(workers, math.inf if strategy == "flat" else FLAT_UP_TO)
    return 1.0, parameters, path.depth, path.volume * parameters


def fit(steps: Sequence[Step], cores: float = math.inf) -> Costs:
    """Fit the coefficients.

    Computation is fitted to complete steps in one process, communication to steps without tasks,
    and memory sharing to complete steps of several workers.

    Args:
        steps: the measurements.
        cores: the cores of the machine; infinity: nothing is shared.

    Raises:
        ValueError: there are too few measurements.
    """
    complete = [step for step in steps if step.strategy == "local" and step.tasks]
    sizes = [(step.tasks, step.parameters) for step in complete]
    rows = [
        (1.0, parameters, tasks, tasks * math.sqrt(parameters), tasks * parameters)
        for tasks, parameters in sizes
    ]
    outer0, outer1, *compute = non_negative(rows, [step.seconds for step in complete])
    coefficients = {}
    for strategy in ("rpc", "allreduce"):
        communication = [step for step in steps if step.strategy == strategy and not step.tasks]
        coefficients[strategy] = non_negative(
            [_terms(strategy, step.workers, step.parameters) for step in communication],
            [step.seconds for step in communication],
        )
    costs = Costs(tuple(compute), (outer0, outer1), **coefficients)
    return costs._replace(sharing=_sharing(costs, steps, cores))


def _sharing(costs: Costs, steps: Sequence[Step], cores: float) -> float:
    """The median share that each further worker on the machine adds to the computation."""
    shares = []
    for strategy, workers, tasks, parameters, seconds in steps:
        if strategy != "local" and tasks and 1 < workers <= cores < math.inf:
            excess = seconds - costs.step(strategy, workers, tasks, parameters)
            computation = costs.computation(math.ceil(tasks / workers), parameters)
            shares.append(excess / computation / (workers - 1))
    return max(0.0, statistics.median(shares)) if shares else 0.0


def with_network(costs: Costs, latency: float | None, bandwidth: float | None) -> Costs:
    """The costs on another network.

    The measured costs of serializing and summing messages are kept: the latency is added to them,
    and the lower one of the two bandwidths is used.

    Args:
        costs: the measured costs.
        latency: the latency of a message, in µs; None: as measured.
        bandwidth: the bandwidth in GB/s; None: as measured.
    """
    rpc, ring = list(costs.rpc), list(costs.allreduce)
    if latency is not None:
        rpc[0] += 2e-6 * latency  # request and response, overlapping for all workers
        ring[2] += 2e-6 * latency  # the receiver of a message announces its buffer
    if bandwidth is not None:
        rpc[2] = max(rpc[2], 12 / (1e9 * bandwidth))  # float32 parameters, float64 gradients
        ring[3] = max(ring[3], 8 / (1e9 * bandwidth))
    return costs._replace(rpc=tuple(rpc), allreduce=tuple(ring))


def non_negative(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[float, ...]:
    """Non-negative least squares on relative errors.

    Args:
        rows: the design matrix, one row per measurement.
        seconds: the measurements, positive.

    Raises:
        ValueError: there are fewer measurements than coefficients.
    """
    if not rows or len(rows) < len(rows[0]):
        raise ValueError(f"{len(rows)} measurements are too few to fit the coefficients")
    matrix = np.asarray(rows, dtype=float) / np.asarray(seconds, dtype=float)[:, None]
    scale = np.abs(matrix).max(0)
    scale[scale == 0] = 1.0
    coefficients, _ = nnls(matrix / scale, np.ones(len(matrix)))
    return tuple((coefficients / scale).tolist())
