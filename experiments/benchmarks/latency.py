"""`remote_sync_call` against a bare `rpc.rpc_sync`: torchrun, two processes.

torchrun --standalone --nproc_per_node=2 experiments/benchmarks/latency.py

Both call the same function with the same small tensor on the other worker, in turn. Prints JSON:
the medians in microseconds and the median over turns of their ratio.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed import rpc

import metadist as todist


def echo(tensor: Tensor) -> Tensor:
    """What is called."""
    return tensor


def median_of(call: Callable[[], object], times: int) -> float:
    """The median duration of a call, in microseconds."""
    found = []
    for _ in range(times):
        started = time.perf_counter()
        call()
        found.append(time.perf_counter() - started)
    return 1e6 * statistics.median(found)


@todist.auto_init_rpc()
def main() -> None:
    """Rank zero calls the other."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--calls", type=int, default=100, help="in a turn, of each")
    asked = parser.parse_args()
    if todist.get_rank() != 0:
        return
    tensor, other = torch.zeros(10), "worker1"

    def bare() -> object:
        return rpc.rpc_sync(other, echo, args=(tensor,))

    def ours() -> object:
        return todist.remote_sync_call(echo, args=(tensor,), partitioner=1)

    turns = []
    for _ in range(asked.turns + 1):  # the first warms up
        turns.append((median_of(bare, asked.calls), median_of(ours, asked.calls)))
    pairs = turns[1:]
    ratio = statistics.median(mine / theirs for theirs, mine in pairs)
    theirs, mine = (statistics.median(each) for each in zip(*pairs, strict=True))
    print(json.dumps({"rpc_sync_us": theirs, "remote_sync_call_us": mine, "ratio": ratio}))


if __name__ == "__main__":
    main()
