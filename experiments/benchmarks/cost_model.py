"""What a training step costs, by a few figures that are fitted to measured steps.

With W workers, T tasks a meta-batch and P parameters, in seconds:

    compute      k·(b0 + b1·√P + b2·P)·(1 + m·(w-1)), k = ⌈T/W⌉ tasks on the busiest worker, w
                 workers on its machine: maps grow as √P, products of matrices as P, and
                 workers on one machine share its memory
    outer step   a0 + a1·P
    rpc          r0 + W·(r1 + r2·P): rank zero sends parameters to each worker, one after the
                 other, and adds up what each sends back
    allreduce    s0 + s1·P + 2·(W-1)·s2 + 2·(W-1)/W·s3·P: a ring, and the float64 copies
    local        nothing

r1 and s2 are latencies, 1/r2 and 1/s3 bandwidths in parameters a second.
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
        tasks: T; 0 for messages alone, without a task's computation or an outer step.
        parameters: P.
        seconds: the median.
    """

    strategy: str
    workers: int
    tasks: int
    parameters: int
    seconds: float


class Costs(NamedTuple):
    """The fitted figures, all at least zero."""

    compute: tuple[float, float, float]
    outer: tuple[float, float]
    rpc: tuple[float, float, float]
    allreduce: tuple[float, float, float, float]
    sharing: float = 0.0

    def computation(self, tasks: int, parameters: int) -> float:
        """Seconds of a worker with so many tasks, alone on its machine."""
        fixed, root, linear = self.compute
        return tasks * (fixed + root * math.sqrt(parameters) + linear * parameters)

    def messages(self, strategy: str, workers: int, parameters: int) -> float:
        """Seconds that the strategy itself takes."""
        if strategy == "local":
            return 0.0
        figures = self.rpc if strategy == "rpc" else self.allreduce
        terms = _TERMS[strategy](workers, parameters)
        return sum(figure * term for figure, term in zip(figures, terms, strict=True))

    def step(
        self, strategy: str, workers: int, tasks: int, parameters: int, cores: float = math.inf
    ) -> float:
        """Seconds of a whole step.

        Args:
            strategy: one of `STRATEGIES`.
            workers: W.
            tasks: T, of the whole meta-batch.
            parameters: P.
            cores: of the one machine that all workers share; fewer than workers stretch the
                computation. Infinitely many: each worker has a machine of its own.
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

    def rank_zero_limit(self, tasks_a_worker: int, parameters: int) -> float:
        """From how many workers on rank zero's messages take longer than a worker's tasks (rpc)."""
        each = self.rpc[1] + self.rpc[2] * parameters
        room = self.computation(tasks_a_worker, parameters) - self.rpc[0]
        return max(1.0, room / each) if each else math.inf


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
    """Fit the figures: computation to whole steps in one process, messages to steps without
    tasks, and then what sharing one machine costs to whole steps of several workers.

    Args:
        steps: measured.
        cores: of the machine they were measured on; infinitely many: nothing is shared.

    Raises:
        ValueError: steps that do not tell the figures apart.
    """
    whole = [step for step in steps if step.strategy == "local" and step.tasks]
    rows = [
        (1.0, s.parameters, s.tasks, s.tasks * math.sqrt(s.parameters), s.tasks * s.parameters)
        for s in whole
    ]
    outer0, outer1, *compute = non_negative(rows, [step.seconds for step in whole])
    found = {}
    for strategy, terms in _TERMS.items():
        alone = [step for step in steps if step.strategy == strategy and not step.tasks]
        found[strategy] = non_negative(
            [terms(step.workers, step.parameters) for step in alone],
            [step.seconds for step in alone],
        )
    costs = Costs(tuple(compute), (outer0, outer1), **found)
    return costs._replace(sharing=_sharing(costs, steps, cores))


def _sharing(costs: Costs, steps: Sequence[Step], cores: float) -> float:
    """How much of a worker's computation each worker beside it adds, in the median of steps."""
    found = []
    for strategy, workers, tasks, parameters, seconds in steps:
        if strategy != "local" and tasks and 1 < workers <= cores < math.inf:
            missing = seconds - costs.step(strategy, workers, tasks, parameters)
            computation = costs.computation(math.ceil(tasks / workers), parameters)
            found.append(missing / computation / (workers - 1))
    return max(0.0, statistics.median(found)) if found else 0.0


def non_negative(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[float, ...]:
    """The least relative squares with figures that are not negative.

    Args:
        rows: what each figure is multiplied by, a row a measurement.
        seconds: what was measured, positive.

    Raises:
        ValueError: fewer measurements than figures.
    """
    if not rows or len(rows) < len(rows[0]):
        raise ValueError(f"{len(rows)} measurements cannot tell so many figures apart")
    matrix = np.asarray(rows, dtype=float) / np.asarray(seconds, dtype=float)[:, None]
    scale = np.abs(matrix).max(0)
    scale[scale == 0] = 1.0
    figures, _ = nnls(matrix / scale, np.ones(len(matrix)))
    return tuple((figures / scale).tolist())
