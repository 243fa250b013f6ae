# fmt: off
# ruff: noqa
"""Documents 000 and 001, "Process group information"."""
import torch
import metadist as todist

seen = {}


def worker_init_fn():
    local_rank = todist.get_local_rank()
    torch.cuda.set_device(local_rank)

@todist.auto_init_rpc(worker_init_fn)
def main():
    seen['info'] = todist.get_world_info()
    seen['one by one'] = (
        todist.get_world_rank(), todist.get_world_size(), todist.get_local_rank(),
        todist.get_local_world_size(),
    )
    seen['rank'] = todist.get_rank()
    seen['worker id'] = todist.get_worker_id()
