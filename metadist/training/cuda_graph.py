"""CUDA graphs: the operations of a function, recorded once and issued to the GPU together."""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

_WARM_UP = 2
"""Calls before the capture, in which libraries choose algorithms and allocate workspaces."""


@functools.cache
def _pool() -> Any:
    """The memory of all graphs of this process, whose results are copied after each replay."""
    return torch.cuda.graph_pool_handle()


def capture(
    function: Callable[..., Sequence[Tensor]], arguments: Sequence[Tensor]
) -> Callable[..., Sequence[Tensor]]:
    """Capture a function of tensors as a CUDA graph.

    What the function does on the CPU, such as reading an attribute, is done in the capture only.

    Args:
        function: a function of tensors that returns tensors, all on one GPU.
        arguments: examples of its arguments. They are copied.

    Returns:
        A function of arguments of the same shapes and types that replays the graph. Its results
        equal those of `function`, bit for bit. A replay of this or another captured function
        overwrites them.

    Raises:
        RuntimeError: the function waits for the GPU, as where Python reads a tensor's value.
    """
    inputs = [argument.detach().clone() for argument in arguments]
    device = inputs[0].device
    side, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream(device))
    # This context also returns to the current stream if the capture fails.
    with torch.cuda.stream(side):
        function(*inputs)
        with no_synchronization():
            for _ in range(_WARM_UP):
                function(*inputs)
        # Other threads, such as those of RPC, may use the GPU during the capture.
        mode = "thread_local"
        with torch.cuda.graph(graph, pool=_pool(), stream=side, capture_error_mode=mode):
            outputs = function(*inputs)
    torch.cuda.current_stream(device).wait_stream(side)

    def replay(*arguments: Tensor) -> Sequence[Tensor]:
        for buffer, argument in zip(inputs, arguments, strict=True):
            buffer.copy_(argument, non_blocking=True)
        graph.replay()
        return outputs

    return replay


@contextlib.contextmanager
def no_synchronization() -> Iterator[None]:
    """Context in which an operation that waits for a GPU raises a RuntimeError."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)
