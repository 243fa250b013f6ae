"""RPC: opening, rendezvous, shutdown, and the loss of workers."""

import contextlib
import ctypes
import os
import pickle
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.distributed import rpc
from torch.distributed.rpc.internal import _internal_rpc_pickler
from worlds import RankFailed, on_rank_zero, run_world

import metadist as todist
from metadist.deadlines import wait_until
from metadist.distributed.rendezvous import wait_for_keys
from metadist.distributed.responses import RemoteFailure
from metadist.distributed.rpc import CALL_TIMEOUT, backend_options
from metadist.distributed.transport import current_transport


@todist.auto_init_rpc()
def rendezvous_all() -> list[tuple[float, float]]:
    times = []
    for late in range(todist.get_world_size()):
        if todist.get_rank() == late:
            time.sleep(0.3)
        came = time.monotonic()
        todist.barrier()
        times.append((came, time.monotonic()))
    return times


@pytest.mark.parametrize("size", [1, 3])
def test_barrier_lets_nobody_go_before_all_have_come(size):
    ranks = run_world(rendezvous_all, size)
    for barrier in zip(*ranks, strict=True):
        assert min(left for _, left in barrier) >= max(came for came, _ in barrier)


def wait_for(*keys: str) -> None:
    """Wait until other ranks have set some keys in the transport's store."""
    assert not wait_for_keys(current_transport().store, list(keys), timeout=50.0), keys


@todist.auto_init_rpc()
def rendezvous_some() -> tuple[float, float]:
    if todist.get_rank() == 2:
        wait_for("one has left")  # it does not wait for the others
    came = time.monotonic()
    todist.barrier([0, "worker2", 2] if todist.get_rank() == 2 else ["worker2", 0])
    if todist.get_rank() == 1:
        current_transport().store.set("one has left", "yes")
    return came, time.monotonic()


def test_barrier_of_some_keeps_those_and_lets_the_others_go():
    zero, _, two = run_world(rendezvous_some, 3)
    assert min(zero[1], two[1]) >= two[0]


@todist.auto_init_rpc()
def rendezvous_without_two(late: bool) -> tuple[str, float] | None:
    if todist.get_rank() == 2:
        wait_for("gave up/0", "gave up/1")
        if late:
            with pytest.raises(todist.WorkerLostError, match="worker2"):
                todist.barrier()  # it has failed for the others: for all
            todist.barrier(timeout=50.0)
        return None
    start = time.monotonic()
    with pytest.raises(todist.WorkerLostError) as caught:
        todist.barrier(timeout=1.0)
    outcome = str(caught.value), time.monotonic() - start
    current_transport().store.set(f"gave up/{todist.get_rank()}", "yes")
    todist.barrier([0, 1])
    if late:
        todist.barrier(timeout=50.0)
    return outcome


@pytest.mark.parametrize("late", [True, False])
def test_a_barrier_that_a_worker_misses_names_it_in_time(late):
    zero, one, _ = run_world(rendezvous_without_two, 3, late)
    for message, _ in (zero, one):
        assert "worker2 (rank 2) did not arrive" in message and "\n" not in message
    assert max(zero[1], one[1]) > 0.9


def call_and_meet_a_frozen_one() -> tuple[str, str] | None:
    todist.init_rpc()  # pings take up to 30 s
    if todist.get_rank() == 1:
        time.sleep(60)
        return None
    process = todist.remote_sync_call(os.getpid, partitioner=1)
    os.kill(process, signal.SIGSTOP)
    try:
        with pytest.raises(TimeoutError) as timed_out:
            todist.remote_sync_call(os.getpid, partitioner=1, timeout=2.0)
        with pytest.raises(todist.WorkerLostError) as lost:
            todist.barrier(timeout=2.0)
    finally:
        os.kill(process, signal.SIGKILL)  # the test would wait for a process that is suspended
    return str(timed_out.value), str(lost.value)


def test_pings_of_a_frozen_worker_do_not_extend_timeouts():
    outcome, _ = run_world(call_and_meet_a_frozen_one, 2, may_fail=True)
    assert isinstance(outcome, tuple), outcome
    call, barrier = outcome
    assert call.startswith("worker1 (rank 1) did not respond within 2 s")
    assert "worker1 (rank 1) did not arrive within 2 s" in barrier


def die(status: int) -> None:
    os._exit(status)


@todist.auto_init_rpc()
def call_one_who_dies() -> float | None:
    if todist.get_rank() != 0:
        time.sleep(30)
        return None
    start = time.monotonic()
    with pytest.raises(todist.WorkerLostError, match="worker1"):
        todist.remote_sync_call(die, args=(3,), partitioner=1)
    with pytest.raises(todist.WorkerLostError, match="worker1"):
        todist.remote_sync_call(die, args=(3,), partitioner=1)
    with pytest.raises(todist.WorkerLostError, match="worker1"):
        todist.remote_async_call(die, args=(3,), partitioner=1).wait()
    seconds = time.monotonic() - start
    todist.shutdown_rpc(graceful=False)
    return seconds


def test_a_worker_that_dies_during_a_call_is_named_long_before_the_calls_timeout():
    outcomes = run_world(call_one_who_dies, 2, may_fail=True)
    assert outcomes[0] < 50 < CALL_TIMEOUT
    assert isinstance(outcomes[1], ProcessLookupError)


def end_together_but(doomed: int, how: str) -> str:
    """All ranks wait in shutdown, but one dies or freezes instead of coming."""
    todist.init_rpc(ping_timeout=2.0)
    todist.barrier()
    process = todist.remote_sync_call(os.getpid, partitioner=doomed)
    todist.barrier()
    if todist.get_rank() == doomed:
        if how == "dies":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        with pytest.raises(todist.WorkerLostError) as caught:
            todist.shutdown_rpc()
        assert not todist.rpc_is_initialized()
    finally:
        if how == "freezes":
            os.kill(process, signal.SIGKILL)
    return str(caught.value)


@pytest.mark.parametrize("doomed", [0, 1, 2])
def test_when_one_dies_those_who_wait_in_shutdown_end(doomed):
    outcomes = run_world(end_together_but, 3, doomed, "dies", may_fail=True)
    assert isinstance(outcomes.pop(doomed), ProcessLookupError)
    for message in outcomes:
        assert isinstance(message, str) and "\n" not in message
        assert f"worker{doomed}" in message


def test_when_one_freezes_those_who_wait_in_shutdown_end():
    message, frozen = run_world(end_together_but, 2, 1, "freezes", may_fail=True)
    assert "worker1" in message and isinstance(frozen, ProcessLookupError)


@todist.auto_init_rpc()
def fail_on_one() -> None:
    if todist.get_rank() == 1:
        raise LookupError("rank one's own mistake")


def test_an_error_on_one_rank_ends_all():
    zero, one, two = run_world(fail_on_one, 3, may_fail=True)
    assert isinstance(one, RankFailed) and "LookupError: rank one's own mistake" in str(one)
    assert "WorkerLostError" in str(zero) and "WorkerLostError" in str(two)


@todist.auto_init_rpc()
def exit_on_one(status: int | None, exits: str) -> int:
    if todist.get_rank() == 1:
        Path(exits).touch()
        sys.exit(status)
    wait_until(Path(exits).exists, 30.0, pause=0.01)
    time.sleep(0.2)
    return todist.remote_sync_call(todist.get_rank, partitioner=1)


@pytest.mark.parametrize("status", [0, None])
def test_sys_exit_without_an_error_ends_the_main_function_like_a_return(status, tmp_path):
    zero, one = run_world(exit_on_one, 2, status, str(tmp_path / "exits"), may_fail=True)
    assert zero == 1 and "SystemExit" in str(one)


def trainer_name(world_rank: int, world_size: int, local_rank: int, local_world_size: int) -> str:
    return f"trainer-{world_rank}-{world_size}-{local_rank}-{local_world_size}"


def own_name() -> str:
    return todist.get_world_info().worker_name


@todist.auto_init_rpc(worker_name_format=trainer_name)
def call_by_given_names() -> tuple:
    size = todist.get_world_size()
    names = [trainer_name(rank, size, rank, size) for rank in range(size)]
    called = [todist.remote_sync_call(own_name, partitioner=name) for name in names]
    value = todist.rpc.RRef(called).to_here()  # as TorchOpt's programs do
    assert value == names and own_name() == names[todist.get_rank()]
    with pytest.raises(todist.UserError, match="trainer-0"):
        todist.get_worker_id("worker0")
    todist.barrier(names)
    return [todist.get_worker_id(name) for name in names], todist.get_worker_id()


@pytest.mark.parametrize("size", [1, 3])
def test_workers_go_by_the_names_they_were_given(size):
    ranks = list(range(size))
    assert run_world(call_by_given_names, size) == [(ranks, rank) for rank in ranks]


happened: list[tuple] = []


def initialize() -> None:
    happened.append(("worker_init_fn", todist.rpc_is_initialized()))


@todist.auto_init_rpc(initialize)
def record_call(text: str, *, more: int) -> list[tuple]:
    """A main function."""
    happened.append((text, more))
    return happened


def call_record_call() -> tuple:
    result = record_call("main", more=1)
    return result, record_call.__name__, record_call.__doc__


@pytest.mark.parametrize("size", [1, 3])
def test_worker_init_fn_is_called_once_on_every_rank_in_the_open_world(size):
    expected = ([("worker_init_fn", True), ("main", 1)], "record_call", "A main function.")
    assert run_world(call_record_call, size) == [expected] * size


def fail_to_initialize() -> None:
    if todist.get_rank() == 1:
        raise LookupError("no GPU for rank one")


@todist.auto_init_rpc(fail_to_initialize)
def never_reached_by_one() -> int:
    return todist.get_rank()


def test_an_error_in_worker_init_fn_ends_the_world():
    zero, one = run_world(never_reached_by_one, 2, may_fail=True)
    assert "WorkerLostError" in str(zero) and "LookupError: no GPU for rank one" in str(one)


def test_misuse_of_the_decorator_is_told_in_a_sentence():
    with pytest.raises(TypeError, match=r"@auto_init_rpc\(\)"):
        todist.auto_init_rpc("worker0")

    @todist.auto_init_rpc
    def main() -> None: ...

    with pytest.raises(TypeError, match=r"@auto_init_rpc\(\)"):
        main()


def open_twice() -> str:
    todist.shutdown_rpc()  # without a world, nothing happens
    todist.init_rpc()
    with pytest.raises(RuntimeError, match="already initialized") as caught:
        todist.init_rpc()
    assert todist.rpc_is_initialized()
    todist.shutdown_rpc()
    assert not todist.rpc_is_initialized()
    return str(caught.value)


def test_a_world_cannot_be_opened_twice_at_once():
    assert "shut it down" in run_world(open_twice, 1)[0]


@todist.auto_init_rpc()
def listening_addresses() -> list[str]:
    return [info for info in _own_listening_sockets() if not info.startswith("0100007F:")]


def _own_listening_sockets() -> list[str]:
    """Local addresses, in the kernel's notation, of this process's listening TCP sockets."""
    own = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            own.add(str(descriptor.readlink()))
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path("/proc/self/net", table).read_text().splitlines()[1:]
    ]
    found = [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own]
    assert found, "an RPC world listens somewhere"
    return found


def test_on_one_node_the_sockets_of_rpc_are_bound_to_loopback():
    assert run_world(listening_addresses, 2) == [[], []]


# --- what crosses ------------------------------------------------------------------------------


class Shared:
    """An argument that counts how often it is pickled."""

    pickled = 0

    def __reduce__(self) -> tuple:
        Shared.pickled += 1
        return Shared, ()


def use(shared: Shared, model: torch.nn.Module, item: torch.Tensor) -> float:
    return item.sum().item()


def count_pickled_and_messages(tasks: int) -> tuple[int, list[int]]:
    sent: list[int] = []
    serialize = _internal_rpc_pickler.serialize

    def weigh(obj: object) -> tuple:
        data, tensors = serialize(obj)
        sent.append(len(data) + sum(t.numel() * t.element_size() for t in tensors))
        return data, tensors

    _internal_rpc_pickler.serialize = weigh
    try:
        results = todist.remote_sync_call(
            use,
            args=(Shared(), torch.nn.Linear(300, 300), torch.ones(tasks, 10)),
            partitioner=todist.dim_partitioner(0, exclusive=True, keepdim=False),
        )
    finally:
        _internal_rpc_pickler.serialize = serialize
    assert results == [10.0] * tasks
    messages = sorted(sent, reverse=True)[: todist.get_world_size()]
    return Shared.pickled, messages


@pytest.mark.parametrize("size", [1, 3])
def test_what_tasks_share_is_sent_once_to_each_worker(size):
    pickled, messages = on_rank_zero(count_pickled_and_messages, size, 32)
    assert pickled == size
    model = 4 * (300 * 300 + 300)
    tasks = 32 / size * 4 * 10
    for message in messages:
        assert model + tasks * 0.9 < message < model + tasks * 1.1 + 300 * 32


def test_errors_pickle():
    for error in (todist.WorkerLostError("worker1 is gone"), todist.UserError("no such thing")):
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error) and str(again) == str(error)
    failure = RemoteFailure("KeyError", "no key", "Traceback: …", of_user=False)
    remote = pickle.loads(pickle.dumps(todist.RemoteError("worker1", failure)))
    assert type(remote) is todist.RemoteError and remote.worker == "worker1"
    assert remote.remote_traceback == "Traceback: …" and "no key" in str(remote)
    assert isinstance(todist.WorkerLostError("x"), ConnectionError)


# --- backend options; no GPU is needed to see what is passed on -----------------------------------

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


class GpuTensor(torch.Tensor):
    """A tensor that is taken for one on a GPU."""

    is_cuda = True


def gpu_tensor() -> torch.Tensor:
    return torch.ones(2).as_subclass(GpuTensor)


def call_for_a_gpu_tensor(partitioner) -> tuple:
    """Whether the response came before the GPU had finished; the devices waited for; its length."""
    synchronizing, finished = threading.Event(), threading.Event()
    devices = []

    def synchronize(device: torch.device) -> None:
        devices.append(device)
        synchronizing.set()
        assert finished.wait(20)

    torch.cuda.synchronize = synchronize
    todist.init_rpc()
    current_transport().carries_devices = True  # as with device maps
    future = todist.remote_async_call(gpu_tensor, partitioner=partitioner, reducer=len)
    assert synchronizing.wait(20)
    early = future.done()
    finished.set()
    shards = future.wait()
    todist.shutdown_rpc()
    return early, devices, shards


def two_shards() -> list[tuple]:
    return [(0, (), {}), (0, (), {})]


@pytest.mark.parametrize(("partitioner", "shards"), [(0, 1), (two_shards, 2)])
def test_a_response_waits_for_the_gpu_that_computes_its_tensors(partitioner, shards):
    waited_for = [torch.device("cpu")]  # where the stand-in is
    expected = (False, waited_for, shards)
    assert run_world(call_for_a_gpu_tensor, 1, partitioner)[0] == expected


def fail_at_the_gpu(partitioner) -> str:
    def synchronize(device: torch.device) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    torch.cuda.synchronize = synchronize
    todist.init_rpc()
    current_transport().carries_devices = True  # as with device maps
    with pytest.raises(RuntimeError) as caught:
        todist.remote_sync_call(gpu_tensor, partitioner=partitioner, reducer=len, timeout=20)
    todist.shutdown_rpc()
    return str(caught.value)


@pytest.mark.parametrize("partitioner", [0, two_shards])
def test_an_error_of_the_gpu_that_computes_a_response_is_raised(partitioner):
    assert "illegal memory access" in run_world(fail_at_the_gpu, 1, partitioner)[0]


def open_with_maps() -> str:
    given = rpc.TensorPipeRpcBackendOptions(device_maps={"worker0": {0: 0}})
    with pytest.raises(todist.UserError) as caught:
        todist.init_rpc(rpc_backend_options=given)
    assert not todist.rpc_is_initialized()
    todist.init_rpc()  # without them it opens
    todist.shutdown_rpc()
    return str(caught.value)


def test_maps_of_devices_that_are_not_there_are_refused_in_a_sentence():
    message = run_world(open_with_maps, 1)[0]
    assert "device_maps" in message and "\n" not in message


def count_arenas(directory: Path) -> int:
    """The arenas of glibc's allocator in this process."""
    libc = ctypes.CDLL(None)
    libc.fopen.restype, libc.fopen.argtypes = ctypes.c_void_p, [ctypes.c_char_p] * 2
    libc.malloc_info.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.fclose.argtypes = [ctypes.c_void_p]
    path = directory / f"malloc-{todist.get_rank()}.xml"
    file = libc.fopen(str(path).encode(), b"w")
    libc.malloc_info(0, file)
    libc.fclose(file)
    return path.read_text().count("<heap nr=")


def arenas_before_and_in_rpc(directory: Path) -> tuple[int, int]:
    before = count_arenas(directory)
    todist.init_rpc()
    parameter = torch.ones(1000, requires_grad=True)
    for _ in range(8):
        with todist.autograd.context() as context:
            results = todist.remote_sync_call(
                torch.exp, args=(parameter.clone(),), partitioner=todist.batch_partitioner
            )
            todist.autograd.backward(context, sum(each.sum() for each in results))
    within = count_arenas(directory)
    todist.shutdown_rpc()
    return before, within


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_info"), reason="needs glibc")
def test_threads_of_rpc_have_no_arenas_of_their_own(tmp_path):
    for before, within in run_world(arenas_before_and_in_rpc, 2, tmp_path):
        assert 0 < within == before


def open_with_another_rank() -> str:
    todist.init_rpc()
    todist.shutdown_rpc()
    rank = todist.get_rank()
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(1 - rank)
    with pytest.raises(todist.UserError) as caught:
        todist.init_rpc()
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    todist.init_rpc()
    todist.shutdown_rpc()
    return str(caught.value)


def test_another_rank_in_the_same_process_is_refused():
    for message in run_world(open_with_another_rank, 2):
        assert message.startswith("the processes of ranks [0, 1] had other ranks when they used")


def open_with_detailed_debugging() -> str:
    def refuse(*args, **options):
        raise ValueError("Process group is not initialized")  # as torch does if started so

    torch.distributed.rpc.init_rpc = refuse
    with pytest.raises(todist.UserError) as caught:
        todist.init_rpc()
    return str(caught.value)


def test_debugging_with_which_rpc_does_not_start_is_named():
    variables = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    (message,) = run_world(open_with_detailed_debugging, 1, environment=variables)
    assert message.endswith("DETAIL (Process group is not initialized): set it to INFO.")


def open_without_room_for_threads() -> str:
    import resource

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + 2**29  # a thread's stack takes 8 MiB
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    with pytest.raises(todist.UserError) as caught:
        todist.init_rpc()
    return str(caught.value)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux")
def test_a_limit_of_threads_is_named():
    for message in run_world(open_without_room_for_threads, 2):
        assert "RPC needs 256 threads in each rank" in message
