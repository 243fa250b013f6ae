"""The tables of the scaling benchmark."""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.cost_model import Costs, Step, with_network
from benchmarks.programs import machine_title
from benchmarks.results import table

DISTRIBUTED = ("rpc", "allreduce")
_TOLERANCE = 0.02
"""Strategies whose steps differ by less than this fraction count as equal."""

ASSUMPTIONS = (
    "every worker has its own core and memory bandwidth; workers that share a machine are slower",
    "all workers have the same number of tasks and the same speed",
    "communication costs as measured over loopback, or as given by --latency and --bandwidth",
    "rpc: a worker sends to up to 8 others in turn; allreduce: a ring up to 8 workers, then groups "
    "of about the square root of their number",
)

NETWORKS = {
    "loopback, as measured": (None, None),
    "10 GbE: 30 µs, 1.25 GB/s": (30.0, 1.25),
    "InfiniBand: 3 µs, 12 GB/s": (3.0, 12.0),
}
"""The latency of a message and the bandwidth, for `with_network`."""


class Extrapolation(NamedTuple):
    """A prediction for more workers.

    Attributes:
        costs: the fitted costs on the target network.
        workers: the numbers of workers.
        tasks_per_worker: the number of tasks of each worker.
        parameters: the model sizes.
    """

    costs: Costs
    workers: Sequence[int]
    tasks_per_worker: int
    parameters: Sequence[int]

    def seconds(self, strategy: str, workers: int, parameters: int) -> float:
        """Seconds of a step."""
        return self.costs.step(strategy, workers, workers * self.tasks_per_worker, parameters)

    def fastest(self, workers: int, parameters: int) -> str:
        """The fastest strategy; "either" within the tolerance."""
        rpc, ring = (self.seconds(strategy, workers, parameters) for strategy in DISTRIBUTED)
        if abs(rpc - ring) < _TOLERANCE * min(rpc, ring):
            return "either"
        return "rpc" if rpc < ring else "allreduce"

    def rows(self) -> list[list[str]]:
        """One row per model size: parameters, limit of rpc, and one cell per number of workers."""
        rows = []
        for parameters in self.parameters:
            limit = self.costs.communication_limit(self.tasks_per_worker, parameters)
            row = [f"{parameters:,}", "never" if math.isinf(limit) else f"{limit:,}"]
            for workers in self.workers:
                alone = self.costs.step("local", 1, self.tasks_per_worker, parameters)
                shares = " / ".join(
                    f"{alone / self.seconds(strategy, workers, parameters):.0%}"
                    for strategy in DISTRIBUTED
                )
                row.append(f"{shares}: {self.fastest(workers, parameters)}")
            rows.append(row)
        return rows

    def header(self) -> list[str]:
        """The column names of `rows`."""
        numbers = [f"{workers:,} workers" for workers in self.workers]
        return ["parameters", "communication takes longer from", *numbers]

    def caption(self) -> str:
        """The meaning of a cell of `rows`."""
        return (
            f"Efficiency of rpc / allreduce with {self.tasks_per_worker} tasks per worker (100%: "
            "one worker alone), and the fastest strategy. From so many workers the communication "
            "of rpc takes longer than a worker's tasks."
        )


def network_table(
    costs: Costs, workers: Sequence[int], tasks_per_worker: int, parameters: Sequence[int]
) -> str:
    """Predicted efficiency on three networks, with and without a tree and groups."""
    rows = []
    for network, (latency, bandwidth) in NETWORKS.items():
        step = with_network(costs, latency, bandwidth).step
        for size in parameters:
            alone = step("local", 1, tasks_per_worker, size)
            cells = (
                " / ".join(
                    f"{alone / step(strategy, number, number * tasks_per_worker, size):.0%}"
                    for strategy in ("direct", "rpc", "flat", "allreduce")
                )
                for number in workers
            )
            rows.append((network, f"{size:,}", *cells))
    title = "Efficiency of rpc direct / rpc as a tree / allreduce as a ring / allreduce in groups"
    columns = ("network", "parameters", *(f"{number:,} workers" for number in workers))
    return table(title, columns, rows)


def tables(
    steps: Sequence[Step], costs: Costs, extrapolation: Extrapolation, cores: int
) -> list[str]:
    """Measured and predicted steps, the fitted costs, and the extrapolation."""
    rows = []
    for strategy, workers, tasks, parameters, seconds in medians(steps):
        if strategy == "local" and not tasks:
            continue
        predicted = predict(costs, Step(strategy, workers, tasks, parameters, seconds), cores)
        error = f"{predicted / seconds - 1:+.0%}"
        count = str(tasks) if tasks else "communication"
        values = (f"{1000 * seconds:.2f}", f"{1000 * predicted:.2f}", error)
        rows.append((strategy, str(workers), count, f"{parameters:,}", *values))
    title = f"ms per step, measured and predicted: {machine_title()}"
    columns = ("strategy", "workers", "tasks", "parameters", "measured", "predicted", "error")
    on_networks = network_table(
        costs, extrapolation.workers, extrapolation.tasks_per_worker, extrapolation.parameters
    )
    note = f"Computation is assumed to slow down in proportion to workers beyond {cores} cores."
    return [
        table(title, columns, rows),
        note,
        "\n".join(f"- {line}" for line in _cost_lines(costs)),
        table(extrapolation.caption(), extrapolation.header(), extrapolation.rows()),
        on_networks,
        "Assumed:",
        "\n".join(f"- {assumption}" for assumption in ASSUMPTIONS),
    ]


def _cost_lines(costs: Costs) -> list[str]:
    unknown = "too small to measure"

    def rate(seconds: float, size: int) -> str:
        return f"{size / seconds / 1e9:.2f} GB/s" if seconds else unknown

    def time(seconds: float) -> str:
        return f"{1e6 * seconds:.0f} µs" if seconds else unknown

    return [
        f"compute: {1e3 * costs.compute[0]:.2f} ms per task, {1e6 * costs.compute[1]:.1f} µs per "
        f"square root of the parameters, {1e9 * costs.compute[2]:.1f} ns per parameter; "
        f"{costs.sharing:.0%} more for each further worker on the machine",
        f"rpc: {time(costs.rpc[1])} and {rate(costs.rpc[2], 12)} per worker, "
        "12 bytes per parameter and round trip",
        f"allreduce: {time(costs.allreduce[2])} per message and "
        f"{rate(costs.allreduce[3], 8)}, 8 bytes per parameter",
    ]


def medians(steps: Sequence[Step]) -> list[Step]:
    """One step per configuration, with the median over rounds."""
    groups: dict[tuple, list[float]] = {}
    for *kind, seconds in steps:
        groups.setdefault(tuple(kind), []).append(seconds)
    return [Step(*kind, statistics.median(times)) for kind, times in groups.items()]


def predict(costs: Costs, step: Step, cores: int) -> float:
    """The model's prediction of a measured step on this machine."""
    if not step.tasks:
        return costs.messages(step.strategy, step.workers, step.parameters)
    return costs.step(step.strategy, step.workers, step.tasks, step.parameters, cores)
