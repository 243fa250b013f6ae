"""Worker calls over another transport than RPC, and the workers' names."""

import hashlib

import pytest
import torch
import torch.distributed as dist
from torch.futures import Future
from transports import InProcess, completed
from worlds import run_world

import metadist as todist
from metadist.distributed import requests
from metadist.distributed import transport as transport_module
from metadist.distributed.transport import describe_worker, open_transport
from metadist.distributed.worker_request import WorkerRequest
from metadist.distributed.world import host_name


class ThisProcess(InProcess):
    """The only worker, which keeps the devices of tensors; records how it is closed."""

    carries_devices = True

    def __init__(self) -> None:
        super().__init__("only")
        self.closed: list[bool] = []

    def close(self, graceful: bool) -> None:
        self.closed.append(graceful)


@pytest.fixture
def transport():
    transport = ThisProcess()
    open_transport(transport)
    yield transport
    todist.shutdown_rpc()


def loss(weight: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return (weight.sum() * batch).square().mean()


def fail(batch: torch.Tensor) -> None:
    raise LookupError("no such item")


def test_calls_need_nothing_but_the_transport(transport):
    weight = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    batch = torch.arange(6.0, dtype=torch.float64)
    partitioner = [todist.Shard("only", (weight, half), size=3) for half in batch.split(3)]
    result = todist.remote_sync_call(
        loss, partitioner=lambda: partitioner, reducer=todist.mean_reducer, gradient="worker"
    )
    expected = loss(weight, batch)
    torch.testing.assert_close(result, expected)
    (gradient,) = torch.autograd.grad(result, weight)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, weight)[0])
    assert todist.remote_async_call(max, args=(1, 3), partitioner="only").wait() == 3
    with pytest.raises(todist.RemoteError, match="LookupError: no such item"):
        todist.remote_sync_call(fail, args=(batch,), partitioner=0)


def refuse(batch: torch.Tensor) -> None:
    raise todist.UserError("this batch is too small")


def two_losses(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return weight.sum(), weight.sum()


def test_reducers_and_errors_of_calls_to_one_worker(transport):
    weight = torch.tensor([2.0, 4.0], requires_grad=True)
    assert todist.remote_sync_call(max, args=(1, 3), partitioner="only", reducer=list) == [3]
    mean = todist.remote_sync_call(max, args=(1, 3), partitioner=0, reducer=todist.mean_reducer)
    assert mean == 3.0 and describe_worker("only") == f"only (rank 0 on {host_name()})"
    with pytest.raises(todist.UserError, match=r"^this batch is too small$"):
        todist.remote_sync_call(refuse, args=(weight,), partitioner="only")
    with pytest.raises(todist.UserError, match='gradient must be "dist_autograd" or "worker"'):
        todist.remote_sync_call(loss, args=(weight, weight), partitioner=0, gradient="local")
    with pytest.raises(todist.UserError, match="fanout must be at least 1"):
        todist.remote_sync_call(max, args=(1, 2), partitioner=0, fanout=0)
    with pytest.raises(todist.RemoteError, match=r"one scalar per result .* has 2 differentiable"):
        todist.remote_sync_call(two_losses, args=(weight,), partitioner=0, gradient="worker")
    with pytest.raises(todist.RemoteError, match=r"the first of shape \(2,\)"):
        todist.remote_sync_call(torch.square, args=(weight,), partitioner=0, gradient="worker")


def test_names_and_barriers_are_those_of_the_transport(transport):
    assert todist.rpc_is_initialized() and todist.get_worker_id("only") == 0
    with pytest.raises(todist.UserError, match="no worker named 'worker0'"):
        todist.get_worker_id("worker0")
    todist.barrier(["only"], timeout=1.0)
    todist.shutdown_rpc()
    assert transport.closed == [True] and not todist.rpc_is_initialized()
    todist.shutdown_rpc(graceful=False)  # nothing is open any more
    assert transport.closed == [True]


class ThreeWorkers(InProcess):
    """Its workers answer no call, and pings have one outcome: an error, or none for None."""

    def __init__(self, ping: Exception | None) -> None:
        super().__init__("worker0", "worker1", "worker2")
        self.outcome = ping

    def send(self, worker: str, request: WorkerRequest, timeout: float | None) -> Future:
        return Future()

    def ping(self, worker: str) -> Future:
        super().ping(worker)
        return Future() if self.outcome is None else completed(self.outcome)


def wait_on_rank_zero(
    ping: Exception | None,
    first: str,
    arrived: list[str],
    timeout: float,
    interval: float,
) -> tuple[str, list[str], str]:
    """Call a barrier that others have joined before; its error, whom it pinged, and who is recorded
    as the first.

    Args:
        ping: the error of a ping; None for pings without an answer.
        first: the worker that arrived first, "" for this one.
        arrived: the workers that have arrived.
        timeout: the timeout of the barrier.
        interval: the seconds between two pings.
    """
    transport_module.PING_INTERVAL = interval
    transport = ThreeWorkers(ping)
    open_transport(transport)
    group = hashlib.sha256(b"barrier/worker0/worker1/worker2").hexdigest()[:16]
    store = dist.PrefixStore(f"{group}#1", transport.store)
    for worker in arrived:
        store.set(worker.removeprefix("worker"), "")
    if first:
        store.set("first", first)
        store.add("arrived", len(arrived))
    message = ""
    try:
        todist.barrier(timeout=timeout)
    except todist.WorkerLostError as error:
        message = str(error)
    todist.shutdown_rpc(graceful=False)
    return message, transport.pinged, store.get("first").decode()


def barrier_of_three(*args) -> tuple[str, list[str], str]:
    """`wait_on_rank_zero`, which must not take longer than the barrier's timeout."""
    return run_world(wait_on_rank_zero, 1, *args, environment={"WORLD_SIZE": 3}, timeout=45)[0]


def test_the_worker_that_came_first_to_a_barrier_is_pinged():
    lost = RuntimeError("no answer")
    message, pinged, _ = barrier_of_three(lost, "worker1", ["worker1"], 60.0, 0.01)
    assert message.startswith("worker1 (rank 1") and message.endswith("not answer (no answer).")
    assert pinged == ["worker1"]


def test_the_worker_that_came_first_to_a_barrier_pings_the_absent_ones():
    lost = RuntimeError("no answer")
    message, pinged, first = barrier_of_three(lost, "", ["worker1"], 60.0, 0.01)
    assert message.startswith("worker2 (rank 2") and message.endswith("not answer (no answer).")
    assert pinged == ["worker2"] and first == "worker0"


@pytest.mark.parametrize("first", ["", "worker1"])
def test_a_ping_does_not_extend_the_timeout_of_a_barrier(first):
    message, pinged, _ = barrier_of_three(None, first, ["worker1"], 3.0, 0.01)
    assert "worker2 (rank 2) did not arrive within 3 s" in message
    assert pinged == [first or "worker2"]


def test_a_barrier_does_not_wait_for_its_next_ping():
    message, pinged, _ = barrier_of_three(None, "worker1", ["worker1"], 0.3, 60.0)
    assert "worker2 (rank 2) did not arrive within 0.3 s" in message and not pinged


def test_a_barrier_ends_if_the_worker_that_came_last_dies_before_it_says_so():
    message, pinged, _ = barrier_of_three(None, "", ["worker1", "worker2"], 60.0, 0.01)
    assert message == "" and not pinged


def call_the_silent(interval: float) -> tuple[str, list[str]]:
    requests.PING_INTERVAL = interval
    transport = ThreeWorkers(None)
    open_transport(transport)
    with pytest.raises(TimeoutError) as caught:
        todist.remote_sync_call(max, args=(1, 2), partitioner=1, timeout=3.0)
    todist.shutdown_rpc(graceful=False)
    return str(caught.value), transport.pinged


@pytest.mark.parametrize(("interval", "expected"), [(0.01, ["worker1"]), (60.0, [])])
def test_pings_do_not_extend_the_timeout_of_a_call(interval, expected):
    world = {"WORLD_SIZE": 3}
    message, pinged = run_world(call_the_silent, 1, interval, environment=world, timeout=45)[0]
    assert message.startswith("worker1 (rank 1) did not respond within 3 s")
    assert pinged == expected


class Unopenable(InProcess):
    def open(self) -> None:
        raise todist.WorkerLostError("nobody is there")


def test_a_transport_that_does_not_open_leaves_nothing_behind():
    with pytest.raises(todist.WorkerLostError, match="nobody"):
        open_transport(Unopenable())
    assert not todist.rpc_is_initialized()


def name_of(world_rank: int, world_size: int, local_rank: int, local_world_size: int) -> str:
    return f"trainer-{world_rank}"


def name_in_error(*ranks: int) -> str:
    return "a name with spaces"


def names_after_shutdown() -> None:
    todist.init_rpc(name_of)
    assert todist.get_world_info().worker_name == "trainer-0"
    todist.shutdown_rpc()
    assert todist.get_worker_id(todist.get_world_info().worker_name) == 0
    with pytest.raises(todist.UserError, match="a name with spaces"):
        todist.init_rpc(name_in_error)
    assert todist.get_worker_id(todist.get_world_info().worker_name) == 0


def test_without_rpc_a_process_has_its_default_name():
    run_world(names_after_shutdown, 1)
