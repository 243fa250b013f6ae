"""Step time by workers, tasks and parameters for each strategy, and a cost model for more workers.

python experiments/benchmark.py scaling --workers 1 2 3 --tasks 4 8 16 --filters 16 32 64

The communication of every strategy is measured with workers that compute nothing, which is possible
with more workers than cores; sums are exchanged over Gloo, as between machines. The computation of
a task is measured in one process. A cost model (cost_model.py) is fitted to both, compared with
complete steps on this machine, and extrapolated to more workers under the assumptions printed with
the table.
"""

import argparse
import json
from pathlib import Path

from benchmarks.cost_model import STRATEGIES, Step, fit, with_network
from benchmarks.programs import BENCHMARKS, TORCHRUN
from benchmarks.programs import run as run_program
from benchmarks.results import console, save
from benchmarks.scaling_tables import Extrapolation, tables

from metadist.distributed.world import usable_cpus

TIMEOUT_SECONDS = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--tasks", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--filters", type=int, nargs="+", default=[16, 32, 64], help="of conv4")
    parser.add_argument("--queries", type=int, default=1, help="per class")
    parser.add_argument("--seconds", type=float, default=1.0, help="per model size")
    parser.add_argument("--rounds", type=int, default=1, help="each in new processes")
    parser.add_argument(
        "--extrapolate", type=int, nargs="+", default=[8, 64, 1024], help="to this many workers"
    )
    parser.add_argument("--tasks-per-worker", type=int, default=4, help="extrapolation")
    parser.add_argument(
        "--latency", type=float, help="extrapolation: of a message, in µs; default: as measured"
    )
    parser.add_argument(
        "--bandwidth", type=float, help="extrapolation: in GB/s; default: as measured"
    )
    parser.add_argument("--out", type=Path, default=Path("outputs/scaling"))


def run(options: argparse.Namespace) -> None:
    """Measure, fit, extrapolate; print and save."""
    counts = [len(set(values)) for values in (options.tasks, options.filters, options.workers)]
    if any(count < least for count, least in zip(counts, (2, 3, 2), strict=True)):
        raise SystemExit(
            "error: the fit needs at least two values of --tasks, three of --filters and two of "
            "--workers"
        )
    steps: list[Step] = []
    for number in range(options.rounds):
        for strategy in STRATEGIES:
            for workers in [1] if strategy == "local" else sorted(set(options.workers)):
                console.print(f"round {number + 1}, {strategy}, {workers} workers", style="dim")
                steps += measure(strategy, workers, options)
    cores = usable_cpus()
    costs = fit(steps, cores)
    target = with_network(costs, options.latency, options.bandwidth)
    extrapolation = Extrapolation(
        target,
        options.extrapolate,
        options.tasks_per_worker,
        sorted({step.parameters for step in steps}),
    )
    data = {
        "cores": cores,
        "costs": costs._asdict(),
        "extrapolated_costs": target._asdict(),
        "steps": [step._asdict() for step in steps],
    }
    save(options.out / "scaling", data, tables(steps, costs, extrapolation, cores), show=True)


def measure(strategy: str, workers: int, options: argparse.Namespace) -> list[Step]:
    """Measure the steps of one process group."""
    # One worker computes the same as strategy=local: complete steps are not measured again.
    tasks = options.tasks if strategy == "local" or workers > 1 else []
    arguments = [f"--queries={options.queries}", f"--seconds={options.seconds}", "--filters"]
    arguments += [*map(str, options.filters), "--tasks", *map(str, tasks)]
    command = [*TORCHRUN, f"--nproc_per_node={workers}", str(BENCHMARKS / "scaling_worker.py")]
    output = run_program([*command, f"--strategy={strategy}", *arguments], TIMEOUT_SECONDS)
    return [Step(**json.loads(line)) for line in output.splitlines() if line.startswith("{")]
