"""Collectives against the same sums computed in one process."""

import functools
import time
from datetime import timedelta
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from worlds import run_world

import metadist as todist
from metadist.distributed import collectives
from metadist.distributed.errors import WorkerLostError
from metadist.distributed.store import world_store


class Metrics(NamedTuple):
    loss: torch.Tensor
    count: int


def refused_values() -> list[str]:
    """The errors of calls that are not the same on both ranks, and a sum after them."""
    rank, messages = todist.get_rank(), []
    calls = (
        lambda: collectives.all_reduce({"loss": rank / 2 if rank else 0}),
        lambda: collectives.broadcast(0.5 if rank == 0 else 0),
        lambda: collectives.all_gather([0, 0.5][rank]),
        lambda: collectives.all_gather(torch.zeros(2, 1 + rank)),
        lambda: collectives.all_reduce(torch.zeros(2, 3) if rank else torch.zeros(3, 2), "max"),
        lambda: collectives.all_reduce(1, "max" if rank else "sum"),
        lambda: collectives.broadcast(1, source=rank),
        lambda: collectives.broadcast(1) if rank else collectives.all_reduce(1),
    )
    for call in calls:
        with pytest.raises(todist.UserError, match="different structures, shapes or types") as info:
            call()
        messages.append(str(info.value))
    with pytest.raises(todist.UserError, match="no rank 2: with 2 ranks choose 0 to 1"):
        collectives.broadcast(1, source=2)
    assert collectives.all_reduce(1) == 2
    return messages


@pytest.mark.parametrize("shared_memory", [True, False])
def test_calls_that_differ_are_refused_on_all_ranks(shared_memory):
    first, second = run_world(in_a_group, 2, refused_values, shared_memory)
    assert first == second and len(first) == 8


def tensor_of(rank: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def structure_of(rank: int) -> dict:
    return {
        "matrix": tensor_of(rank, 2, 3),
        "pair": (tensor_of(rank + 10, 4).float(), [tensor_of(rank + 20)]),
        "whole": torch.tensor([rank, 2 * rank]),
        "metrics": Metrics(tensor_of(rank + 30, 1), rank + 1),
        "number": rank + 0.1,
        "flag": rank == 0,
        "nothing": None,
    }


def in_a_group(function, shared_memory=True):
    collectives.init_process_group("gloo", shared_memory=shared_memory)
    try:
        return function()
    finally:
        collectives.destroy_process_group()


def reduce_every_way() -> dict:
    mine = structure_of(todist.get_rank())
    results = {op: collectives.all_reduce(mine, op) for op in ("sum", "mean", "max", "min")}
    before = structure_of(todist.get_rank())
    torch.testing.assert_close(mine["matrix"], before["matrix"], rtol=0, atol=0)
    with pytest.raises(todist.UserError, match="product"):
        collectives.all_reduce(1.0, "product")
    return results


@pytest.mark.parametrize("size", [1, 3])
def test_all_reduce_of_nested_structures(size):
    gathered = [structure_of(rank) for rank in range(size)]
    stacked = torch.stack([each["matrix"] for each in gathered])
    whole = torch.stack([each["whole"] for each in gathered])
    numbers = [each["number"] for each in gathered]
    counts = [each["metrics"].count for each in gathered]
    flags = [each["flag"] for each in gathered]
    expected = {
        "sum": (stacked.sum(0), whole.sum(0), sum(numbers), sum(counts), sum(flags)),
        "mean": (
            stacked.mean(0),
            whole.double().mean(0),
            sum(numbers) / size,
            sum(counts) / size,
            sum(flags) / size,
        ),
        "max": (stacked.amax(0), whole.amax(0), max(numbers), max(counts), max(flags)),
        "min": (stacked.amin(0), whole.amin(0), min(numbers), min(counts), min(flags)),
    }
    for results in run_world(in_a_group, size, reduce_every_way):
        for op, (matrix, integers, number, count, flag) in expected.items():
            result = results[op]
            torch.testing.assert_close(result["matrix"], matrix)
            torch.testing.assert_close(result["whole"].double(), integers.double())
            assert result["number"] == pytest.approx(number)
            assert type(result["metrics"]) is Metrics
            assert result["metrics"].count == pytest.approx(count)
            assert result["flag"] == pytest.approx(flag)
            assert result["nothing"] is None
            assert result["pair"][0].dtype is torch.float32
            assert type(result["pair"]) is tuple and result["pair"][1][0].shape == ()
        assert results["sum"]["whole"].dtype is torch.int64
        assert results["mean"]["whole"].dtype is torch.float64
        assert type(results["sum"]["metrics"].count) is int
        assert type(results["mean"]["metrics"].count) is float


def broadcast_from(source: int) -> dict:
    return collectives.broadcast(structure_of(todist.get_rank()) | {"seed": 2**62 + 1}, source)


@pytest.mark.parametrize(("size", "source"), [(1, 0), (3, 0), (3, 2)])
def test_broadcast(size, source):
    expected = structure_of(source)
    for result in run_world(in_a_group, size, functools.partial(broadcast_from, source)):
        for name in ("matrix", "whole"):
            assert torch.equal(result[name], expected[name])
        assert torch.equal(result["pair"][1][0], expected["pair"][1][0])
        assert result["number"] == expected["number"] and result["flag"] is expected["flag"]
        assert result["metrics"].count == expected["metrics"].count
        assert result["seed"] == 2**62 + 1


def gather_uneven() -> list:
    rank = todist.get_rank()
    mine = {
        "rows": tensor_of(rank, rank, 3),  # rank zero has none
        "flat": torch.arange(rank + 1),
        "scalar": torch.tensor(rank + 0.25),
        "number": rank + 0.1,
        "count": 2**60 + rank,
        "flag": rank == 1,
    }
    return collectives.all_gather(mine)


@pytest.mark.parametrize("size", [1, 3])
def test_all_gather_with_uneven_first_dimensions(size):
    for gathered in run_world(in_a_group, size, gather_uneven):
        assert len(gathered) == size
        for rank, part in enumerate(gathered):
            assert part["rows"].shape == (rank, 3)
            assert torch.equal(part["rows"], tensor_of(rank, rank, 3))
            assert part["flat"].tolist() == list(range(rank + 1))
            assert part["scalar"].shape == () and part["scalar"].item() == rank + 0.25
            assert part["number"] == rank + 0.1 and part["count"] == 2**60 + rank
            assert part["flag"] is (rank == 1)


def differentiate_all_reduce() -> tuple:
    """Each rank's loss is c_r * s^3 with s the sum of every rank's square; c_r = r + 1."""
    rank = todist.get_rank()
    x = torch.tensor(rank + 2.0, dtype=torch.float64, requires_grad=True)
    total = collectives.all_reduce({"s": x.square()})["s"]
    ((rank + 1) * total**3).backward()
    y = torch.tensor(rank + 2.0, dtype=torch.float64, requires_grad=True)
    average = collectives.all_reduce(y.square(), "mean")
    ((rank + 1) * average).backward()
    return x.grad.item(), y.grad.item()


@pytest.mark.parametrize("size", [1, 3])
def test_the_derivative_of_all_reduce_is_that_of_all_ranks_losses(size):
    gradients = run_world(in_a_group, size, differentiate_all_reduce)
    total = sum((rank + 2.0) ** 2 for rank in range(size))
    weight = sum(rank + 1 for rank in range(size))
    for rank, (of_sum, of_mean) in enumerate(gradients):
        assert of_sum == pytest.approx(weight * 3 * total**2 * 2 * (rank + 2.0), rel=1e-12)
        assert of_mean == pytest.approx(weight * 2 * (rank + 2.0) / size, rel=1e-12)


def square_here(x: torch.Tensor) -> torch.Tensor:
    return x.square() + todist.get_rank()


@todist.auto_init_rpc()
def beside_rpc() -> list:
    collectives.init_process_group()
    rank, size = todist.get_rank(), todist.get_world_size()
    results = []
    for step in range(3):
        neighbour = (rank + 1) % size
        answer = todist.remote_sync_call(
            square_here, args=(torch.tensor(float(step)),), partitioner=neighbour
        )
        results.append(collectives.all_reduce(answer).item())
        todist.barrier()
        collectives.barrier()
    collectives.destroy_process_group()
    assert not dist.is_initialized()
    return results


@pytest.mark.parametrize("size", [1, 3])
def test_collectives_beside_rpc_in_the_same_world(size):
    expected = [size * step**2 + sum(range(size)) for step in range(3)]
    assert run_world(beside_rpc, size) == [expected] * size


def wait_for_a_rank_that_does_not_come(flat_up_to: int) -> str:
    collectives.init_process_group("gloo", timeout=2, flat_up_to=flat_up_to, shared_memory=False)
    collectives.all_reduce(1.0)
    rank, store = todist.get_rank(), world_store()
    if rank == 2:
        store.wait(["given up/0", "given up/1"], timedelta(seconds=40))
        return ""
    with pytest.raises(WorkerLostError) as lost:
        collectives.all_reduce(1.0)
    store.set(f"given up/{rank}", "")
    return str(lost.value)


@pytest.mark.parametrize("flat_up_to", [2, 3])
def test_gloo_waits_for_the_timeout_at_most(flat_up_to):
    *messages, _ = run_world(wait_for_a_rank_that_does_not_come, 3, flat_up_to)
    assert all("left or stopped during a collective" in message for message in messages)


def open_and_close() -> list[int]:
    sums = []
    for _ in range(3):
        collectives.init_process_group("gloo")
        sums.append(collectives.all_reduce(todist.get_rank() + 1))
        collectives.destroy_process_group()
        collectives.destroy_process_group()  # without one, nothing happens
    return sums


def test_a_group_can_be_opened_again():
    assert run_world(open_and_close, 2) == [[3, 3, 3]] * 2


def keep_in_step() -> tuple[float, float]:
    time.sleep(0.3 * todist.get_rank())
    came = time.monotonic()
    collectives.barrier()
    return came, time.monotonic()


@pytest.mark.parametrize("size", [1, 3])
def test_barrier_lets_nobody_go_before_all_have_come(size):
    times = run_world(in_a_group, size, keep_in_step)
    assert min(left for _, left in times) >= max(came for came, _ in times)


def reduce_a_type_that_gloo_lacks() -> int:
    with pytest.raises(RuntimeError, match="scalar type"):
        collectives.all_reduce(torch.ones(2, dtype=torch.uint16), "max")
    return collectives.all_reduce(1)


def test_a_programming_error_is_not_a_lost_worker():
    assert run_world(in_a_group, 2, reduce_a_type_that_gloo_lacks) == [2, 2]


def choose_backend_with_a_broken_driver() -> str:
    patch = pytest.MonkeyPatch()
    patch.setattr(torch.cuda, "is_available", lambda: todist.get_rank() == 0)
    patch.setattr(torch.cuda, "device_count", lambda: 2)
    patch.setattr(dist, "is_nccl_available", lambda: True)
    with pytest.raises(todist.UserError) as caught:
        collectives.init_process_group(rendezvous_timeout=20)
    assert not dist.is_initialized()
    return str(caught.value)


def test_ranks_with_and_without_a_gpu_are_told_at_once():
    messages = run_world(choose_backend_with_a_broken_driver, 2)
    assert messages[0] == messages[1]
    assert "cpu:gloo,cuda:nccl on ranks [0]" in messages[0] and "gloo on ranks [1]" in messages[0]


def choose_backends(devices: dict[str, list[str | None]]) -> dict[str, tuple]:
    """The backends, the group's GPU and the process's GPU on a machine with two GPUs."""
    patch, chosen, current = pytest.MonkeyPatch(), {}, []
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "device_count", lambda: 2)
    patch.setattr(torch.cuda, "set_device", current.append)
    patch.setattr(dist, "is_nccl_available", lambda: True)
    for name, by_rank in devices.items():
        device = by_rank[todist.get_rank()]

        def record(backends: str, *, device_id: torch.device | None, name: str = name, **_) -> None:
            chosen[name] = (backends, device_id, *current)

        patch.setattr(dist, "init_process_group", record)
        current.clear()
        collectives.init_process_group(
            shared_memory=False, device=None if device is None else torch.device(device)
        )
    return chosen


def test_the_backend_fits_the_devices_of_the_ranks():
    devices = {
        "default": [None, None],
        "by local rank": ["cuda", "cuda"],
        "swapped": ["cuda:1", "cuda:0"],
        "shared": ["cuda:1", "cuda:1"],
        "cpu": ["cpu", "cpu"],
    }
    nccl = "cpu:gloo,cuda:nccl"
    gpus = [torch.device("cuda", index) for index in range(2)]
    for rank, chosen in enumerate(run_world(choose_backends, 2, devices)):
        own, other = gpus[rank], gpus[1 - rank]
        assert chosen == {
            "default": (nccl, own, own),
            "by local rank": (nccl, own, own),
            "swapped": (nccl, other, other),
            "shared": ("gloo", None),
            "cpu": ("gloo", None),
        }
    alone = run_world(choose_backends, 1, {"alone": ["cuda:1"]})
    assert alone == [{"alone": (nccl, gpus[1], gpus[1])}]


def reduce_extremes_and_small_integers() -> list:
    rank = dist.get_rank()
    values = torch.tensor([torch.nan, 1.0] if rank else [0.0, 2.0])
    small = torch.tensor([200], dtype=torch.uint8)
    return [
        collectives.all_reduce({"values": values, "number": values[0].item()}, op)
        for op in ("max", "min")
    ] + [collectives.all_reduce(small, op).item() for op in ("sum", "mean")]


def test_a_nan_of_any_rank_and_sums_of_small_integers():
    found = run_world(in_a_group, 2, reduce_extremes_and_small_integers)
    for largest, smallest, total, mean in found:
        for extreme, other in ((largest, 2.0), (smallest, 1.0)):
            assert extreme["values"][0].isnan() and extreme["values"][1] == other
            assert extreme["number"] != extreme["number"]
        assert (total, mean) == (400, 200.0)


def reduce_numpy_and_other_types() -> dict:
    rank = dist.get_rank()
    small = torch.tensor([rank, 300], dtype=torch.int16)
    return {
        "array": collectives.all_reduce(np.array([0.5, rank])),
        "scalar": collectives.all_reduce(np.float32(2.5), "mean"),
        "largest": collectives.all_reduce({"small": small, "array": np.array([rank])}, "max"),
        "beside a gradient": collectives.all_reduce(
            (torch.ones(1, dtype=torch.float64, requires_grad=True), np.float64(rank), 1.0)
        ),
        "complex": collectives.all_reduce(torch.tensor([1 + 2j]), "mean"),
        "broadcast": [
            collectives.broadcast(torch.full((2,), rank + 1, dtype=dtype)).tolist()
            for dtype in (torch.int16, torch.float8_e4m3fn, torch.complex64, torch.bool)
        ],
        "gathered": collectives.all_gather((small[: rank + 1], np.float32(rank))),
    }


def test_numpy_and_types_that_the_backend_does_not_know():
    for found in run_world(in_a_group, 2, reduce_numpy_and_other_types):
        assert isinstance(found["array"], np.ndarray) and found["array"].tolist() == [1.0, 1.0]
        assert found["scalar"] == 2.5
        assert found["largest"]["small"].tolist() == [1, 300]
        assert found["largest"]["small"].dtype is torch.int16
        assert found["largest"]["array"].tolist() == [1]
        loss, scalar, number = found["beside a gradient"]
        assert loss.requires_grad and (loss.item(), scalar, number) == (2.0, 1.0, 2.0)
        assert type(scalar) is np.float64
        assert found["complex"].tolist() == [1 + 2j]
        assert found["broadcast"] == [[1, 1], [1.0, 1.0], [1 + 0j, 1 + 0j], [True, True]]
        (first, zero), (second, one) = found["gathered"]
        assert (first.tolist(), second.tolist()) == ([0], [1, 300])
        assert (zero, one) == (0.0, 1.0) and type(one) is np.float32


def test_nccl_without_a_gpu_is_one_sentence(monkeypatch):
    with pytest.raises(todist.UserError, match="backend=nccl needs a GPU"):
        collectives.init_process_group("nccl", rendezvous_timeout=20)


def test_a_rank_that_is_lost_in_a_barrier_of_nccl_is_a_lost_worker(monkeypatch):
    def lose() -> None:
        raise dist.DistBackendError(
            "NCCL error: remote process exited or there was a network error"
        )

    monkeypatch.setattr(dist, "get_backend_config", lambda: "cuda:nccl")
    monkeypatch.setattr(dist, "barrier", lose)
    with pytest.raises(WorkerLostError, match="remote process exited"):
        collectives.barrier()
