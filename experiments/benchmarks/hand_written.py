"""The rival that everyone can write: a MAML loop in bare PyTorch, one all-reduce a step.

torchrun --standalone --nproc_per_node=2 experiments/benchmarks/hand_written.py --tasks 32

Every process takes every other task, adds its gradient up in float32, and one all-reduce of one
flat tensor averages it. It draws the same tasks as metadist, and nothing else of it is used.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from problem import INNER_LR, OUTER_LR, conv4, few_shot, measure, words
from torch.func import functional_call

from metadist.tasks import task_keys


def main() -> None:
    """Train for the number of steps that is asked for."""
    asked = words()
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    tasks = few_shot(asked)
    model = conv4(asked.pooling)
    names = [name for name, _ in model.named_parameters()]
    optimizer = torch.optim.Adam(model.parameters(), OUTER_LR)

    def step(iteration: int) -> float:
        optimizer.zero_grad()
        total = torch.zeros(1)
        keys = task_keys(0, "train", iteration, range(asked.tasks))
        for key in keys[rank::size]:
            support, query = tasks.sample(key)
            adapted = list(model.parameters())
            for _ in range(asked.inner_steps):
                predictions = functional_call(
                    model, dict(zip(names, adapted, strict=True)), (support.inputs,)
                )
                loss = F.cross_entropy(predictions, support.targets)
                slopes = torch.autograd.grad(loss, adapted, create_graph=True)
                adapted = [p - INNER_LR * slope for p, slope in zip(adapted, slopes, strict=True)]
            predictions = functional_call(
                model, dict(zip(names, adapted, strict=True)), (query.inputs,)
            )
            loss = F.cross_entropy(predictions, query.targets) / asked.tasks
            loss.backward()
            total += loss.detach()
        flat = torch.cat([total, *(p.grad.flatten() for p in model.parameters())])
        dist.all_reduce(flat)
        pieces = flat[1:].split([p.numel() for p in model.parameters()])
        for parameter, piece in zip(model.parameters(), pieces, strict=True):
            parameter.grad.copy_(piece.view_as(parameter))
        optimizer.step()
        return flat[0].item()

    found = measure(asked, step)
    if rank == 0:
        print(found)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
