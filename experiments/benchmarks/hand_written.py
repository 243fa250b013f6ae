"""The rival that everyone can write: a MAML loop in bare PyTorch, one all-reduce a step.

torchrun --standalone --nproc_per_node=2 experiments/benchmarks/hand_written.py --tasks 32

Every process takes every other task, adds its gradient up in float32, and one all-reduce of one
flat tensor averages it. It draws the same tasks as metadist, and nothing else of it is used.
"""

import argparse
import json
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from metadist.tasks import FewShotTasks, Glyphs, task_keys


def conv4(pooling: str) -> nn.Sequential:
    """Four blocks of 64 filters on 28×28 images, five classes."""
    layers: list[nn.Module] = []
    for channels in (1, 64, 64, 64):
        layers += [
            nn.Conv2d(channels, 64, 3, stride=2 if pooling == "stride" else 1, padding=1),
            nn.BatchNorm2d(64, track_running_stats=False),
            nn.ReLU(),
        ]
        if pooling == "max":
            layers.append(nn.MaxPool2d(2))
    layers += [nn.AdaptiveAvgPool2d(1)] if pooling == "stride" else []
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64, 5))


def main() -> None:
    """Time a number of steps behind a warm-up and print them as JSON."""
    parser = argparse.ArgumentParser()
    for name, default in (("tasks", 32), ("shots", 1), ("queries", 1), ("inner-steps", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--pooling", default="stride")
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--warm-up", type=int, default=3)
    asked = parser.parse_args()

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    tasks = FewShotTasks(Glyphs(), 5, asked.shots, asked.queries)
    model = conv4(asked.pooling)
    names = [name for name, _ in model.named_parameters()]
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    start = 0.0
    for iteration in range(asked.warm_up + asked.iterations):
        if iteration == asked.warm_up:
            dist.barrier()
            start = time.perf_counter()
        optimizer.zero_grad()
        keys = task_keys(0, "train", iteration, range(asked.tasks))
        for key in keys[rank::size]:
            support, query = tasks.draw(key)
            adapted = list(model.parameters())
            for _ in range(asked.inner_steps):
                predictions = functional_call(
                    model, dict(zip(names, adapted, strict=True)), (support.inputs,)
                )
                loss = F.cross_entropy(predictions, support.targets)
                steps = torch.autograd.grad(loss, adapted, create_graph=True)
                adapted = [p - 0.4 * step for p, step in zip(adapted, steps, strict=True)]
            predictions = functional_call(
                model, dict(zip(names, adapted, strict=True)), (query.inputs,)
            )
            (F.cross_entropy(predictions, query.targets) / asked.tasks).backward()
        flat = torch.cat([p.grad.flatten() for p in model.parameters()])
        dist.all_reduce(flat)
        pieces = flat.split([p.numel() for p in model.parameters()])
        for parameter, piece in zip(model.parameters(), pieces, strict=True):
            parameter.grad.copy_(piece.view_as(parameter))
        optimizer.step()
    seconds = time.perf_counter() - start
    if rank == 0:
        print(json.dumps({"tasks_per_second": asked.tasks * asked.iterations / seconds}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
