"""Many nested calls: no deadlock, no lost call, no thread left running."""

import math
import threading
import time
from pathlib import Path

import pytest
import torch
from worlds import on_rank_zero, run_world

import metadist as todist


def squares(item: torch.Tensor) -> torch.Tensor:
    """The second level: shared out among all workers."""
    return todist.remote_sync_call(
        torch.square, args=(item,), partitioner=todist.batch_partitioner, reducer=todist.sum_reducer
    ).sum()


def below(depth: int, number: int) -> int:
    """Calls the next worker, `depth` levels down; each level adds its rank's share."""
    if depth == 0:
        return number
    next_worker = (todist.get_rank() + 1) % todist.get_world_size()
    return 1 + todist.remote_sync_call(below, args=(depth - 1, number), partitioner=next_worker)


@todist.auto_init_rpc()
def call_deep(depth: int, calls: int) -> list[int]:
    """Every rank calls at once, each call `depth` levels deep."""
    futures = [
        todist.remote_async_call(
            below, args=(depth, i), partitioner=(todist.get_rank() + i) % todist.get_world_size()
        )
        for i in range(calls)
    ]
    return [future.wait() for future in futures]


@pytest.mark.parametrize(("size", "depth"), [(1, 3), (3, 4)])
def test_deep_calls_from_all_ranks_at_once_do_not_deadlock(size, depth):
    expected = [depth + i for i in range(25)]
    assert run_world(call_deep, size, depth, 25) == [expected] * size


def sine_elsewhere(x: torch.Tensor) -> torch.Tensor:
    neighbour = (todist.get_rank() + 1) % todist.get_world_size()
    return todist.remote_sync_call(torch.sin, args=(x,), partitioner=neighbour)


def differentiate_many(calls: int) -> float:
    x = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    with todist.autograd.context() as context:
        futures = [
            todist.remote_async_call(sine_elsewhere, args=(x.clone(),), partitioner=i % 2)
            for i in range(calls)
        ]
        todist.autograd.backward(context, sum(future.wait() for future in futures))
    return x.grad.item()


def test_a_hundred_nested_calls_one_by_one_in_a_context_do_not_deadlock():
    gradient = on_rank_zero(differentiate_many, 2, 100)
    assert gradient == pytest.approx(100 * math.cos(1.0), rel=1e-12)


def call_two_thousand(way: str) -> tuple[float, float, int]:
    items = torch.arange(4000, dtype=torch.float64).reshape(2000, 2)
    before = threading.active_count()
    start = time.monotonic()
    if way == "grouped":
        total = todist.remote_sync_call(
            squares,
            args=(items,),
            partitioner=todist.exclusive_batch_partitioner,
            reducer=todist.sum_reducer,
        ).item()
    else:
        total = 0.0
        for first in range(0, 2000, 250):
            futures = [
                todist.remote_async_call(squares, args=(items[i : i + 1],), partitioner=i % 2)
                for i in range(first, first + 250)
            ]
            total += sum(future.wait().item() for future in futures)
    return total, time.monotonic() - start, threading.active_count() - before


@pytest.mark.slow
@pytest.mark.parametrize("way", ["grouped", "one by one"])
def test_two_thousand_nested_calls(way):
    total, seconds, threads = on_rank_zero(call_two_thousand, 2, way, timeout=300)
    assert total == (torch.arange(4000, dtype=torch.float64) ** 2).sum().item()
    print(f"2,000 nested calls {way}: {seconds:.1f} s, {threads} threads more")
    assert seconds < 240


def call_and_fail(times: int) -> int:
    failed = 0
    for i in range(times):
        try:
            todist.remote_sync_call(torch.reshape, args=(torch.ones(3), (i + 4,)), partitioner=1)
        except todist.RemoteError:
            failed += 1
    assert todist.remote_sync_call(pow, args=(2, 3), partitioner=1) == 8
    return failed


def test_many_failed_calls_leave_the_world_in_order():
    assert on_rank_zero(call_and_fail, 2, 100) == 100


def nested_loss(model: torch.nn.Module, item: torch.Tensor) -> torch.Tensor:
    """Half of it comes from the next worker."""
    neighbour = (todist.get_rank() + 1) % todist.get_world_size()
    here = model(item)
    return (here + todist.remote_sync_call(torch.sin, args=(here,), partitioner=neighbour)).sum()


def resident_megabytes() -> float:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) / 1024 for line in status.splitlines() if "VmRSS" in line)


def differentiate_in_contexts(times: int) -> tuple[list, float]:
    torch.manual_seed(0)
    model = torch.nn.Linear(300, 300).double()
    items = torch.linspace(-1, 1, 5 * 300, dtype=torch.float64).reshape(5, 300)
    loss = sum((model(item) + model(item).sin()).sum() for item in items)
    expected = torch.autograd.grad(loss, list(model.parameters()))
    start, seen = time.monotonic(), []
    for i in range(times):
        model.zero_grad()
        with todist.autograd.context() as context:
            loss = todist.remote_sync_call(
                nested_loss,
                args=(todist.module_clone(model, by="clone"), items),
                partitioner=todist.dim_partitioner(0, exclusive=True, keepdim=False),
                reducer=todist.sum_reducer,
            )
            todist.autograd.backward(context, loss)
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-10, atol=1e-12)
        if i in (times // 5, times - 1):
            seen.append(
                [
                    (threading.active_count(), resident_megabytes()),
                    todist.remote_sync_call(threading.active_count, partitioner=1),
                    todist.remote_sync_call(resident_megabytes, partitioner=1),
                ]
            )
    return seen, time.monotonic() - start


@pytest.mark.slow
def test_five_hundred_contexts_with_nested_calls():
    (early, late), seconds = on_rank_zero(differentiate_in_contexts, 2, 500, timeout=300)
    print(f"500 contexts: {seconds:.1f} s; threads and MB after 100 and 500: {early}, {late}")
    assert late[0][0] <= early[0][0] + 2 and late[1] <= early[1] + 2
    # 400 contexts more, each with ten graphs and gradients of 0.7 MB, leave nothing behind.
    assert late[0][1] - early[0][1] < 100 and late[2] - early[2] < 100
