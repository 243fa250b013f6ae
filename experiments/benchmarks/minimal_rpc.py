"""The minimal start that `overhead startup` compares with: import torch and open RPC.

torchrun --standalone --nproc_per_node=2 experiments/benchmarks/minimal_rpc.py
"""

import os

from torch.distributed import rpc

rank = int(os.environ["RANK"])
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
if rank == 0:
    print("open", flush=True)
rpc.shutdown()
