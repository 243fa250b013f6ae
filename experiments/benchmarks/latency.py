"""Latency of `remote_sync_call` and of `rpc.rpc_sync`, in two processes.

torchrun --standalone --nproc_per_node=2 experiments/benchmarks/latency.py

Both call the same function with the same small tensor on the other worker, alternately. Prints
JSON: the medians in microseconds, and the median of their ratio over the rounds.
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
    """The function that is called."""
    return tensor


def median_of(call: Callable[[], object], times: int) -> float:
    """The median duration of a call, in microseconds."""
    durations = []
    for _ in range(times):
        started = time.perf_counter()
        call()
        durations.append(time.perf_counter() - started)
    return 1e6 * statistics.median(durations)


@todist.auto_init_rpc()
def main() -> None:
    """Rank zero calls the other rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--calls", type=int, default=100, help="of each, per round")
    options = parser.parse_args()
    if todist.get_rank() != 0:
        return
    tensor, callee = torch.zeros(10), "worker1"

    def rpc_sync() -> object:
        return rpc.rpc_sync(callee, echo, args=(tensor,))

    def metadist_call() -> object:
        return todist.remote_sync_call(echo, args=(tensor,), partitioner=1)

    rounds = []
    for _ in range(options.rounds + 1):  # the first round is the warm-up
        rounds.append((median_of(rpc_sync, options.calls), median_of(metadist_call, options.calls)))
    pairs = rounds[1:]
    ratio = statistics.median(ours / bare for bare, ours in pairs)
    bare, ours = (statistics.median(times) for times in zip(*pairs, strict=True))
    print(json.dumps({"rpc_sync_us": bare, "remote_sync_call_us": ours, "ratio": ratio}))


if __name__ == "__main__":
    main()
