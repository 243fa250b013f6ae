"""Step time against workers, tasks and parameters for each strategy, and what it says of more.

python experiments/scaling.py --workers 1 2 3 --tasks 4 8 16 --filters 16 32 64

Every strategy's messages are measured by themselves, with workers that compute nothing, so that
more workers than cores disturb them little; a task's computation is measured in one process. A
cost model (cost_model.py) fitted to both is compared with whole steps on this machine and extended
to more workers, on the assumptions that are printed beside the table.
"""

import argparse
import json
from pathlib import Path

from benchmarks.cost_model import STRATEGIES, Costs, Step, fit
from benchmarks.programs import HERE, TORCHRUN, machine, run
from benchmarks.scaling_tables import Extension, markdown, picture, tables
from rich.console import Console

from metadist.distributed.world import usable_cpus

PATIENCE = 600.0


def main() -> None:
    """Measure, fit, extend; print and save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--tasks", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--filters", type=int, nargs="+", default=[16, 32, 64], help="of conv4")
    parser.add_argument("--queries", type=int, default=1, help="a class")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each size")
    parser.add_argument("--rounds", type=int, default=1, help="each in new processes")
    parser.add_argument("--extend", type=int, nargs="+", default=[8, 64, 1024], help="workers")
    parser.add_argument("--tasks-a-worker", type=int, default=4, help="there")
    parser.add_argument("--latency", type=float, help="there, of a message, in µs; default as here")
    parser.add_argument("--bandwidth", type=float, help="there, in GB/s; default: as here")
    parser.add_argument("--out", type=Path, default=Path("outputs/scaling"))
    asked = parser.parse_args()
    different = [len(set(numbers)) for numbers in (asked.tasks, asked.filters, asked.workers)]
    if any(found < least for found, least in zip(different, (2, 3, 2), strict=True)):
        parser.error("a fit needs two numbers of tasks, three of filters, two of workers, or more")
    console, steps = Console(highlight=False), []
    for number in range(asked.rounds):
        for strategy in STRATEGIES:
            for workers in [1] if strategy == "local" else sorted(set(asked.workers)):
                console.print(f"round {number + 1}, {strategy}, {workers} workers", style="dim")
                steps += measured(strategy, workers, asked)
    cores = usable_cpus()
    costs = fit(steps, cores)
    there = elsewhere(costs, asked.latency, asked.bandwidth)
    extension = Extension(
        there, asked.extend, asked.tasks_a_worker, sorted({step.parameters for step in steps})
    )
    asked.out.mkdir(parents=True, exist_ok=True)
    shown = tables(steps, costs, extension, cores)
    with (asked.out / "scaling.txt").open("w", encoding="utf-8") as file:
        for target in (console, Console(file=file, width=140)):
            target.print(*shown, sep="\n")
    (asked.out / "scaling.md").write_text(markdown(extension), encoding="utf-8")
    report = {
        "machine": machine(),
        "cores": cores,
        "costs": costs._asdict(),
        "costs_of_the_extension": there._asdict(),
        "steps": [step._asdict() for step in steps],
    }
    (asked.out / "scaling.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    picture(steps, costs, extension, cores, asked.out / "scaling.png")
    console.print(f"saved: {asked.out}/scaling.txt, .md, .json, .png")


def measured(strategy: str, workers: int, asked: argparse.Namespace) -> list[Step]:
    """The steps of one world."""
    # Alone, a worker computes as in one process: whole steps there would tell nothing new.
    tasks = asked.tasks if strategy == "local" or workers > 1 else []
    words = [f"--queries={asked.queries}", f"--seconds={asked.seconds}", "--filters"]
    words += [*map(str, asked.filters), "--tasks", *map(str, tasks)]
    command = [*TORCHRUN, f"--nproc_per_node={workers}", str(HERE / "scaling_world.py")]
    printed = run([*command, f"--strategy={strategy}", *words], PATIENCE)
    return [Step(**json.loads(line)) for line in printed.splitlines() if line.startswith("{")]


def elsewhere(costs: Costs, latency: float | None, bandwidth: float | None) -> Costs:
    """The costs on another network: a latency in µs, a bandwidth in GB/s; None is as here.

    What this machine takes to write, read and add up messages stays: a network adds to it, and
    only the greater of the two bandwidths' times counts.
    """
    rpc, ring = list(costs.rpc), list(costs.allreduce)
    if latency is not None:
        rpc[0] += 2e-6 * latency  # there and back, under way to all workers at once
        ring[2] += 1e-6 * latency
    if bandwidth is not None:
        rpc[2] = max(rpc[2], 12 / (1e9 * bandwidth))  # float32 there, float64 back
        ring[3] = max(ring[3], 8 / (1e9 * bandwidth))
    return costs._replace(rpc=tuple(rpc), allreduce=tuple(ring))
