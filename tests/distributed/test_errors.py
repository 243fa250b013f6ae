"""Connection errors of collectives are a lost worker; every other error is what it is."""

import pickle

import pytest
import torch.distributed as dist

import metadist as todist
from metadist.distributed.errors import (
    RendezvousClosedError,
    RendezvousTimeoutError,
    connection_errors_as_worker_lost,
    first_line,
)

LOST = [
    RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:4321"),
    RuntimeError("[gloo/transport/tcp/pair.cc:152] Read error: Connection reset by peer"),
    RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1000ms for recv"),
    RuntimeError("Gloo connectFullMesh failed with SO_ERROR: Connection refused"),
    RuntimeError("NCCL error: remote process exited or there was a network error, ncclRemoteError"),
    dist.DistNetworkError("The client socket has failed to connect"),
]

PROGRAMMING = [
    RuntimeError("No backend type associated with device type cpu"),
    RuntimeError("[enforce fail at third_party/gloo/gloo/types.h:110] 16 vs 8"),
    RuntimeError("ProcessGroupNCCL: invalid tensor type"),
    RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
]


@pytest.mark.parametrize("error", LOST, ids=str)
def test_a_lost_connection_is_a_lost_worker(error):
    with pytest.raises(todist.WorkerLostError) as caught, connection_errors_as_worker_lost():
        raise error
    assert caught.value.rank is None and "\n" not in str(caught.value)


@pytest.mark.parametrize("error", PROGRAMMING, ids=str)
def test_a_programming_error_is_no_lost_worker(error):
    with pytest.raises(RuntimeError) as caught, connection_errors_as_worker_lost():
        raise error
    assert caught.value is error


@pytest.mark.parametrize(
    "kind", [todist.WorkerLostError, RendezvousTimeoutError, RendezvousClosedError]
)
def test_they_pickle_with_the_rank(kind):
    again = pickle.loads(pickle.dumps(kind("worker1 is gone", rank=1)))
    assert type(again) is kind and str(again) == "worker1 is gone" and again.rank == 1
    assert isinstance(again, ConnectionError)


def test_an_error_without_a_text_is_named_by_its_class():
    assert [first_line(OSError(text)) for text in ("", "\n a \n b")] == ["OSError", "a "]


def test_the_line_of_a_compilation_in_a_subprocess_is_that_of_its_error():
    text = "In a subprocess:\n\nTraceback:\n  File x\nRuntimeError: no memory\n\n\nSet TORCHDYNAMO_"
    error = RuntimeError(f"{text}VERBOSE=1 for the internal stack trace\n")
    assert first_line(error) == "In a subprocess: RuntimeError: no memory"
