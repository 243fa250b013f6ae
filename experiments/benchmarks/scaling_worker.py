"""Time the steps of one strategy in one process group; print a line of JSON for each size.

torchrun --standalone --nproc_per_node=2 experiments/benchmarks/scaling_worker.py --strategy rpc
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from metadist.algorithms import MAML, Learner, TaskResult
from metadist.distributed import dim_partitioner, get_rank, get_world_size, mean_reducer
from metadist.distributed.process_exit import exit_without_finalizing
from metadist.distributed.reducers import leaf_dtypes, weighted_sum
from metadist.distributed.responses import Gradients, WorkerResponse
from metadist.distributed.worker_local import WorkerLocal
from metadist.distributed.worker_request import Call
from metadist.kernels import tune_malloc
from metadist.models import Conv4
from metadist.tasks import FewShotTasks, Glyphs, task_keys
from metadist.training import (
    AllReduceStrategy,
    LocalStrategy,
    MetaBatch,
    RpcStrategy,
    Strategy,
    TrainMapper,
)

STRATEGIES = {
    "local": LocalStrategy,
    "rpc": RpcStrategy,
    # The cost model describes messages between machines.
    "allreduce": partial(AllReduceStrategy, shared_memory=False),
}


@dataclass(frozen=True)
class NoTasks:
    """A mapper that computes nothing: messages have full size, gradients are zero."""

    def __call__(self, learner: Learner, batch: MetaBatch) -> TaskResult:
        """Not called: the strategies call `weighted_sum`."""
        raise NotImplementedError

    def weighted_sum(
        self, calls: list[Call], weights: list[float], inputs: list[Tensor]
    ) -> WorkerResponse:
        """See `SummingMapper`."""
        result = TaskResult(torch.zeros(()), {})
        gradients = [torch.zeros_like(tensor, dtype=torch.float64) for tensor in inputs]
        return WorkerResponse(
            weighted_sum([result], [1]), Gradients(0, gradients), leaf_dtypes(result)
        )


def main() -> None:
    """Measure steps of all requested sizes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", choices=STRATEGIES, default="rpc")
    parser.add_argument("--filters", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument(
        "--tasks", type=int, nargs="*", default=[4, 16], help="none: communication only"
    )
    parser.add_argument("--queries", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=2.0, help="per size")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tune_malloc()  # as every run does
    strategy: Strategy = STRATEGIES[options.strategy](
        dim_partitioner(0, exclusive=True, keepdim=False), mean_reducer
    )
    tasks = FewShotTasks(Glyphs(), 5, 1, options.queries)
    train = TrainMapper(WorkerLocal("tasks", tasks))
    strategy.open()
    if strategy.is_driver:
        for filters in options.filters:
            learner = MAML(Conv4(tasks.input_shape, tasks.outputs, filters)).train()
            optimizer = torch.optim.Adam(learner.parameters(), 1e-3)
            for count in (0, *options.tasks):
                batch = MetaBatch(task_keys(0, "train", 0, range(count or get_world_size())))
                call = partial(
                    strategy.forward_backward, train if count else NoTasks(), learner, batch
                )
                seconds = median_of(call, optimizer if count else None, options.seconds)
                if get_rank() == 0:
                    report(options.strategy, count, learner, seconds)
    strategy.close()


def median_of(
    forward_backward: Callable[..., tuple[object, bool]],
    optimizer: torch.optim.Optimizer | None,
    budget: float,
) -> float:
    """The median duration of steps that take about `budget` seconds in total."""
    times: list[float] = []
    started = before = time.perf_counter()

    def is_enough() -> bool:
        return len(times) >= 4 and time.perf_counter() - started > budget

    # All ranks stop after the same step, as in training.
    stopping = False
    while not stopping:
        _, stopping = forward_backward(stop_requested=is_enough)
        if optimizer is not None:
            optimizer.step()
        now = time.perf_counter()
        times.append(now - before)
        before = now
    return statistics.median(times[1:])  # the first step is the warm-up


def report(strategy: str, tasks: int, learner: Learner, seconds: float) -> None:
    """Print a measurement."""
    record = {
        "strategy": strategy,
        "workers": get_world_size(),
        "tasks": tasks,
        "parameters": sum(parameter.numel() for parameter in learner.parameters()),
        "seconds": seconds,
    }
    print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
    exit_without_finalizing(0)
