"""Cost model of a training step, fitted to measured steps.

With W workers, T tasks per meta-batch and P parameters, in seconds:

    compute      k·(b0 + b1·√P + b2·P)·(1 + m·(w-1)), k = ⌈T/W⌉ tasks on the busiest worker, w
                 workers on its machine: feature maps grow as √P, matrix products as P, and
                 workers on one machine share its memory bandwidth
    outer step   a0 + a1·P
    rpc          r0 + W·(r1 + r2·P): rank zero sends the parameters to each worker in turn and
                 sums the gradients
    allreduce    s0 + s1·P + 2·(W-1)·s2 + 2·(W-1)/W·s3·P: ring all-reduce of float64 copies
    local        0

r1 and s2 are latencies, 1/r2 and 1/s3 bandwidths in parameters per second.
"""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls

STRATEGIES = ("local", "rpc", "allreduce")


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
        """Seconds of a worker with `tasks` tasks, alone on its machine."""
        fixed, root, linear = self.compute
        return tasks * (fixed + root * math.sqrt(parameters) + linear * parameters)

    def messages(self, strategy: str, workers: int, parameters: int) -> float:
        """Seconds of communication."""
        if strategy == "local":
            return 0.0
        coefficients = self.rpc if strategy == "rpc" else self.allreduce
        terms = _TERMS[strategy](workers, parameters)
        return sum(c * term for c, term in zip(coefficients, terms, strict=True))

    def step(
        self, strategy: str, workers: int, tasks: int, parameters: int, cores: float = math.inf
    ) -> float:
        """Seconds of a complete step.

        Args:
            strategy: one of `STRATEGIES`.
            workers: W.
            tasks: T, of the whole meta-batch.
            parameters: P.
            cores: of the one machine that all workers share; fewer cores than workers slow the
                computation down. Infinity: each worker has its own machine.
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

    def rank_zero_limit(self, tasks_per_worker: int, parameters: int) -> float:
        """Number of workers from which rank zero's communication exceeds a worker's tasks (rpc)."""
        each = self.rpc[1] + self.rpc[2] * parameters
        available = self.computation(tasks_per_worker, parameters) - self.rpc[0]
        return max(1.0, available / each) if each else math.inf


_TERMS = {
    "rpc": lambda workers, parameters: (1.0, workers, workers * parameters),
    "allreduce": lambda workers, parameters: (
        1.0,
        parameters,
        2 * (workers - 1),
        2 * (workers - 1) / workers * parameters,
    ),
}


def fit(steps: Sequence[Step], cores: float = math.inf) -> Costs:
    """Fit the coefficients: computation to complete steps in one process, communication to steps
    without tasks, and memory sharing to complete steps of several workers.

    Args:
        steps: the measurements.
        cores: of the machine; infinity: nothing is shared.

    Raises:
        ValueError: too few measurements.
    """
    complete = [step for step in steps if step.strategy == "local" and step.tasks]
    rows = [
        (1.0, s.parameters, s.tasks, s.tasks * math.sqrt(s.parameters), s.tasks * s.parameters)
        for s in complete
    ]
    outer0, outer1, *compute = non_negative(rows, [step.seconds for step in complete])
    found = {}
    for strategy, terms in _TERMS.items():
        communication = [step for step in steps if step.strategy == strategy and not step.tasks]
        found[strategy] = non_negative(
            [terms(step.workers, step.parameters) for step in communication],
            [step.seconds for step in communication],
        )
    costs = Costs(tuple(compute), (outer0, outer1), **found)
    return costs._replace(sharing=_sharing(costs, steps, cores))


def _sharing(costs: Costs, steps: Sequence[Step], cores: float) -> float:
    """The median share that each further worker on the machine adds to the computation."""
    found = []
    for strategy, workers, tasks, parameters, seconds in steps:
        if strategy != "local" and tasks and 1 < workers <= cores < math.inf:
            excess = seconds - costs.step(strategy, workers, tasks, parameters)
            computation = costs.computation(math.ceil(tasks / workers), parameters)
            found.append(excess / computation / (workers - 1))
    return max(0.0, statistics.median(found)) if found else 0.0


def non_negative(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[float, ...]:
    """Non-negative least squares on relative errors.

    Args:
        rows: the design matrix, a row per measurement.
        seconds: the measurements, positive.

    Raises:
        ValueError: fewer measurements than coefficients.
    """
    if not rows or len(rows) < len(rows[0]):
        raise ValueError(f"{len(rows)} measurements are too few to fit the coefficients")
    matrix = np.asarray(rows, dtype=float) / np.asarray(seconds, dtype=float)[:, None]
    scale = np.abs(matrix).max(0)
    scale[scale == 0] = 1.0
    coefficients, _ = nnls(matrix / scale, np.ones(len(matrix)))
    return tuple((coefficients / scale).tolist())
