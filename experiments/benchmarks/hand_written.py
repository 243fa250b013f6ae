"""Baseline: a MAML loop in plain PyTorch with one all-reduce per step.

torchrun --standalone --nproc_per_node=2 experiments/benchmarks/hand_written.py --tasks 32

Each process computes every `world_size`-th task and sums the gradients in float32; one all-reduce
of a flat tensor averages them. Only the tasks come from metadist.
"""

import os

import torch
import torch.distributed as dist
from problem import (
    OUTER_LR,
    few_shot_tasks,
    inner_lr,
    loss,
    measure,
    network,
    parse_arguments,
)
from torch.func import functional_call

from metadist.tasks import task_keys


def main() -> None:
    """Train for the requested number of steps."""
    options = parse_arguments()
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    tasks = few_shot_tasks(options)
    model, rate = network(options), inner_lr(options)
    names = [name for name, _ in model.named_parameters()]
    optimizer = torch.optim.Adam(model.parameters(), OUTER_LR, fused=True)

    def step(iteration: int) -> float:
        optimizer.zero_grad()
        total = torch.zeros(1)
        keys = task_keys(0, "train", iteration, range(options.tasks))
        for key in keys[rank::size]:
            support, query = tasks.sample(key)
            adapted = list(model.parameters())
            for _ in range(options.inner_steps):
                predictions = functional_call(
                    model, dict(zip(names, adapted, strict=True)), (support.inputs,)
                )
                value = loss(predictions, support.targets)
                gradients = torch.autograd.grad(value, adapted, create_graph=True)
                adapted = [p - rate * g for p, g in zip(adapted, gradients, strict=True)]
            predictions = functional_call(
                model, dict(zip(names, adapted, strict=True)), (query.inputs,)
            )
            value = loss(predictions, query.targets) / options.tasks
            value.backward()
            total += value.detach()
        flat = torch.cat([total, *(p.grad.flatten() for p in model.parameters())])
        dist.all_reduce(flat)
        chunks = flat[1:].split([p.numel() for p in model.parameters()])
        for parameter, chunk in zip(model.parameters(), chunks, strict=True):
            parameter.grad.copy_(chunk.view_as(parameter))
        optimizer.step()
        return flat[0].item()

    result = measure(options, step)
    if rank == 0:
        print(result, flush=True)
    dist.barrier()
    os._exit(0)  # torch 2.14 may abort while it destroys a Gloo group


if __name__ == "__main__":
    main()
