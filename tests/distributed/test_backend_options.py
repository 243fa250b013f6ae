"""Which options of TensorPipe a world is opened with. No GPU is needed to see what is passed on."""

import pytest
import torch
from torch.distributed import rpc
from worlds import run_world

import metadist as todist
from metadist.distributed.backend_options import backend_options

MAPS = {"worker1": {0: 1}, "worker2": {"cuda:0": "cuda:2"}}
DEVICES = {
    "worker1": {torch.device("cuda:0"): torch.device("cuda:1")},
    "worker2": {torch.device("cuda:0"): torch.device("cuda:2")},
}


def test_without_options_there_are_many_threads_and_minutes():
    options = backend_options()
    assert options.num_worker_threads == 256 and options.rpc_timeout == 300.0
    assert options.device_maps == {} and options.devices == []


def test_device_maps_are_passed_on_and_the_rest_stays():
    given = rpc.TensorPipeRpcBackendOptions(device_maps=MAPS, devices=[0])
    options = backend_options(given)
    assert options.device_maps == DEVICES and options.devices == [torch.device("cuda:0")]
    assert options.num_worker_threads == 256 and options.rpc_timeout == 300.0
    # The user's own are as they were.
    assert options is not given and given.init_method == "env://"
    assert given.num_worker_threads == 16 and given.rpc_timeout == 60.0


def test_a_choice_of_threads_and_timeout_holds():
    given = rpc.TensorPipeRpcBackendOptions(num_worker_threads=40, rpc_timeout=7.5)
    options = backend_options(given)
    assert options.num_worker_threads == 40 and options.rpc_timeout == 7.5


OPTIONS = {"num_worker_threads": 40, "rpc_timeout": 7.5}


def open_two_worlds() -> list[tuple]:
    given = rpc.TensorPipeRpcBackendOptions(**OPTIONS)

    @todist.auto_init_rpc(rpc_backend_options=given)
    def look() -> tuple:
        options = rpc.api._get_current_rpc_agent()._get_backend_options()
        other = (todist.get_rank() + 1) % todist.get_world_size()
        three = todist.remote_sync_call(max, args=(1, 3), partitioner=other)
        return options.num_worker_threads, options.rpc_timeout, three

    return [look(), look()]


@pytest.mark.parametrize("size", [1, 2])
def test_one_set_of_options_serves_two_worlds(size):
    assert run_world(open_two_worlds, size) == [[(40, 7.5, 3)] * 2] * size


def open_with_maps() -> str:
    given = rpc.TensorPipeRpcBackendOptions(device_maps={"worker0": {0: 0}})
    with pytest.raises(todist.UserError) as caught:
        todist.init_rpc(rpc_backend_options=given)
    assert not todist.rpc_is_initialized()
    todist.init_rpc()  # without them it opens
    todist.shutdown_rpc()
    return str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="here the GPU of the device map exists")
def test_maps_of_devices_that_are_not_there_are_refused_in_a_sentence():
    message = run_world(open_with_maps, 1)[0]
    assert "device_maps" in message and "\n" not in message
