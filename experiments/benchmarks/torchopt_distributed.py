"""Baseline: MAML with torchopt.distributed, after its documentation.

torchrun --standalone --nproc_per_node=2 experiments/benchmarks/torchopt_distributed.py --tasks 8

Rank zero samples the tasks and sends each one to a worker. The graph spans the workers, and
distributed autograd computes the gradient. With many tasks it can deadlock, because its RPC threads
block on each other.
"""

import torch
import torchopt
import torchopt.distributed as todist
from problem import (
    OUTER_LR,
    few_shot_tasks,
    inner_lr,
    loss,
    measure,
    network,
    parse_arguments,
)
from torch import Tensor, nn

from metadist.tasks import stack_episodes, task_keys

OPTIONS = parse_arguments()


@todist.parallelize(
    partitioner=todist.dim_partitioner(0, exclusive=True, keepdim=False),
    reducer=todist.mean_reducer,
)
def query_loss(
    model: nn.Module, inputs: Tensor, targets: Tensor, queries: Tensor, query_targets: Tensor
) -> Tensor:
    """The query loss of one task after adaptation."""
    model = torchopt.module_clone(model, by="reference", detach_buffers=True)
    inner = torchopt.MetaSGD(model, lr=inner_lr(OPTIONS))
    for _ in range(OPTIONS.inner_steps):
        inner.step(loss(model(inputs), targets))
    return loss(model(queries), query_targets)


@todist.auto_init_rpc(lambda: torch.set_num_threads(1))
def main() -> None:
    """Rank zero trains; the other ranks serve RPCs."""
    train()
    todist.barrier()


@todist.rank_zero_only
def train() -> None:
    """Train for the requested number of steps."""
    torch.manual_seed(0)
    tasks = few_shot_tasks(OPTIONS)
    model = network(OPTIONS)
    optimizer = torch.optim.Adam(model.parameters(), OUTER_LR, fused=True)

    def step(iteration: int) -> float:
        keys = task_keys(0, "train", iteration, range(OPTIONS.tasks))
        (inputs, targets), (queries, query_targets) = stack_episodes(
            [tasks.sample(key) for key in keys]
        )
        with todist.autograd.context() as context_id:
            clone = torchopt.module_clone(model, by="clone")
            value = query_loss(clone, inputs, targets, queries, query_targets)
            optimizer.zero_grad()
            todist.autograd.backward(context_id, value)
        optimizer.step()
        return value.item()

    print(measure(OPTIONS, step), flush=True)


if __name__ == "__main__":
    main()
