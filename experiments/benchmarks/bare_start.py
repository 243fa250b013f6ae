"""What starting costs at the least: torchrun, import torch, open RPC, say so.

torchrun --standalone --nproc_per_node=2 experiments/benchmarks/bare_start.py
"""

import os

from torch.distributed import rpc

rank = int(os.environ["RANK"])
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
if rank == 0:
    print("open", flush=True)
rpc.shutdown()
