"""What every rank gets from every rank: sums, means, extremes, and all parts side by side.

    torchrun --standalone --nproc_per_node=2 experiments/primitives/reductions.py

A reduction takes whole structures, holds the ranks in step as a barrier does, and passes
derivatives on: the derivative of a sum over ranks is that of all ranks' losses together.
"""

import torch

import metadist as todist
from metadist.distributed import collectives


def main() -> None:
    """Show each collective on small values that tell which rank they came from."""
    collectives.init_process_group("gloo")
    rank, size = todist.get_rank(), todist.get_world_size()

    mine = torch.full((size,), rank)
    figures = {"loss": torch.tensor(rank + 0.5), "items": rank + 1}
    parts = torch.arange(rank + 1)  # a longer one on each rank
    x = torch.tensor(float(rank + 1), requires_grad=True)
    collectives.all_reduce(x.square()).backward()

    lines = [
        f"[{rank}] mine              {mine.tolist()}",
        f"[{rank}] all_reduce sum    {collectives.all_reduce(mine).tolist()}",
        f"[{rank}] all_reduce max    {collectives.all_reduce(mine, 'max').tolist()}",
        f"[{rank}] all_reduce mean   {collectives.all_reduce(figures, 'mean')}",
        f"[{rank}] all_gather        {[part.tolist() for part in collectives.all_gather(parts)]}",
        f"[{rank}] broadcast from 0  {collectives.broadcast(mine).tolist()}",
        f"[{rank}] derivative        {x.grad.item()}",
    ]
    print("".join(f"{line}\n" for line in lines), end="")
    collectives.destroy_process_group()


if __name__ == "__main__":
    main()
