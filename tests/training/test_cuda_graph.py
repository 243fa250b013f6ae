"""The calls with which a function is captured, on a simulated GPU. See also `gpu_training.py`."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from metadist.training.cuda_graph import capture


@pytest.fixture
def gpu(monkeypatch):
    """The streams that calls were made on, the options of captures, and the debug mode."""
    state = SimpleNamespace(stream="default", mode=0, captures=[])

    class Stream:
        def __init__(self, device):
            self.device = device

        def wait_stream(self, other):
            pass

    @contextlib.contextmanager
    def stream(value):
        before, state.stream = state.stream, value
        yield
        state.stream = before

    @contextlib.contextmanager
    def graph(cuda_graph, **options):
        state.captures.append(options)
        yield

    def set_mode(mode):
        state.mode = mode

    class CUDAGraph:
        def replay(self):
            pass

    names = {"Stream": Stream, "stream": stream, "graph": graph, "CUDAGraph": CUDAGraph}
    names |= {"current_stream": Stream, "graph_pool_handle": object}
    names |= {"get_sync_debug_mode": lambda: state.mode, "set_sync_debug_mode": set_mode}
    for name, value in names.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return state


def test_a_capture_is_on_a_stream_of_the_arguments_device_and_shares_one_pool(gpu):
    seen = []

    def double(x):
        seen.append((gpu.stream, gpu.mode))
        return [2 * x]

    for _ in range(2):
        capture(double, [torch.ones(3)])
    streams, modes = zip(*seen[:4], strict=True)
    assert len(set(streams)) == 1 and streams[0].device == torch.device("cpu")
    assert modes == (0, "error", "error", 0)  # libraries may wait in the first call
    first, second = gpu.captures
    assert first["stream"] is streams[0] and first["capture_error_mode"] == "thread_local"
    assert first["pool"] is second["pool"] and first["stream"] is not second["stream"]
    assert (gpu.stream, gpu.mode) == ("default", 0)


def test_arguments_are_copied_into_the_places_that_the_graph_reads(gpu):
    places = []
    replay = capture(lambda x: places.append(x) or [x], [torch.ones(3)])
    replay(torch.full((3,), 4.0))
    assert places[-1].tolist() == [4.0] * 3
    with pytest.raises(ValueError, match="argument 2"):
        replay()


def test_a_function_that_waits_leaves_the_debug_mode_as_it_was(gpu):
    def waits(x):
        if gpu.mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        return [x]

    with pytest.raises(RuntimeError, match="synchronizing"):
        capture(waits, [torch.ones(3)])
    assert gpu.mode == 0 and not gpu.captures
