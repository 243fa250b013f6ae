"""all_reduce, all_gather and broadcast.

    torchrun --standalone --nproc_per_node=2 experiments/primitives/collectives.py

The collectives accept nested structures, synchronize the ranks, and are differentiable: the
gradient of a sum over ranks is the gradient of the sum of all ranks' losses.
"""

import torch

import metadist as todist
from metadist.distributed import collectives


def main() -> None:
    """Print the result of each collective on small, rank-dependent values."""
    collectives.init_process_group("gloo")
    rank, size = todist.get_rank(), todist.get_world_size()

    values = torch.full((size,), rank)
    metrics = {"loss": torch.tensor(rank + 0.5), "items": rank + 1}
    parts = torch.arange(rank + 1)  # the length differs between ranks
    x = torch.tensor(float(rank + 1), requires_grad=True)
    collectives.all_reduce(x.square()).backward()

    lines = [
        f"[{rank}] input             {values.tolist()}",
        f"[{rank}] all_reduce sum    {collectives.all_reduce(values).tolist()}",
        f"[{rank}] all_reduce max    {collectives.all_reduce(values, 'max').tolist()}",
        f"[{rank}] all_reduce mean   {collectives.all_reduce(metrics, 'mean')}",
        f"[{rank}] all_gather        {[part.tolist() for part in collectives.all_gather(parts)]}",
        f"[{rank}] broadcast from 0  {collectives.broadcast(values).tolist()}",
        f"[{rank}] gradient          {x.grad.item()}",
    ]
    print("".join(f"{line}\n" for line in lines), end="")
    collectives.destroy_process_group()


if __name__ == "__main__":
    main()
