"""Baseline: MAML with higher, after its own example; one process with two threads.

python experiments/benchmarks/higher_maml.py --tasks 8
"""

import higher
import torch
from problem import (
    OUTER_LR,
    few_shot_tasks,
    inner_lr,
    loss,
    measure,
    network,
    parse_arguments,
)

from metadist.tasks import task_keys

THREADS = 2


def main() -> None:
    """Train for the requested number of steps."""
    options = parse_arguments()
    torch.manual_seed(0)
    torch.set_num_threads(THREADS)
    tasks = few_shot_tasks(options)
    model = network(options)
    optimizer = torch.optim.Adam(model.parameters(), OUTER_LR, fused=True)
    inner = torch.optim.SGD(model.parameters(), inner_lr(options))

    def step(iteration: int) -> float:
        optimizer.zero_grad()
        total = 0.0
        for key in task_keys(0, "train", iteration, range(options.tasks)):
            support, query = tasks.sample(key)
            with higher.innerloop_ctx(model, inner, copy_initial_weights=False) as (fast, steps):
                for _ in range(options.inner_steps):
                    steps.step(loss(fast(support.inputs), support.targets))
                value = loss(fast(query.inputs), query.targets) / options.tasks
                value.backward()
                total += value.item()
        optimizer.step()
        return total

    print(measure(options, step))


if __name__ == "__main__":
    main()
