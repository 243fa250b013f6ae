"""Requests over a tree of workers: the same results and errors as without, and few messages."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.futures import Future
from transports import InProcess, completed
from worlds import on_rank_zero, run_world

import metadist as todist
from metadist.distributed.rendezvous import wait_for_keys
from metadist.distributed.requests import SubtreeRequest
from metadist.distributed.responses import RemoteFailure
from metadist.distributed.transport import Request, current_transport, open_transport
from metadist.distributed.worker_request import WorkerRequest

WORKERS = 8
ITEMS = 18


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 1)


def make_batch() -> torch.Tensor:
    return torch.randn(ITEMS, 4, generator=torch.Generator().manual_seed(1))


def mean_loss(model: nn.Module, batch: torch.Tensor) -> dict:
    return {"loss": model(batch).square().mean(), "rank": todist.get_rank(), "none": None}


def fail_on_last(batch: torch.Tensor) -> None:
    if todist.get_rank() == WORKERS - 1:
        raise LookupError("no such item")


def refuse_on_last(batch: torch.Tensor) -> None:
    if todist.get_rank() == WORKERS - 1:
        raise todist.UserError("use another item.")


def as_long_as_the_rank(batch: torch.Tensor) -> torch.Tensor:
    return torch.ones(1 + todist.get_rank())


def sleep_on_last(batch: torch.Tensor) -> None:
    if todist.get_rank() == WORKERS - 1:
        time.sleep(2.0)


def backwards(*args) -> list:
    """The shards of `batch_partitioner`, the last worker's first, some workers twice."""
    shards = todist.batch_partitioner(*args)
    return shards[::-1] + shards[2:4]


def own_copies(model: nn.Module, batch: torch.Tensor) -> list:
    """Every worker differentiates by parameters of its own."""
    models = [model, *(todist.module_clone(model, by="clone") for _ in range(WORKERS - 1))]
    parts = batch.tensor_split(WORKERS)
    return [
        todist.Shard(i, (m, x), size=len(x))
        for i, (m, x) in enumerate(zip(models, parts, strict=True))
    ]


def call_over_trees(fanouts: list[int]) -> list:
    """What rank zero gets with each fanout."""
    outcomes = []
    for fanout in fanouts:
        model, batch = make_model(), make_batch()
        options = {"args": (model, batch), "fanout": fanout}
        total = todist.remote_sync_call(
            mean_loss, reducer=todist.sum_reducer, gradient="worker", **options
        )
        each = todist.remote_sync_call(
            mean_loss, partitioner=backwards, gradient="worker", **options
        )
        other = todist.remote_sync_call(
            mean_loss,
            partitioner=own_copies,
            reducer=todist.mean_reducer,
            gradient="worker",
            **options,
        )
        losses = [total["loss"], *(result["loss"] for result in each), other["loss"]]
        gradients = [torch.autograd.grad(loss, [*model.parameters()]) for loss in losses]
        ranks = [total["rank"], [result["rank"] for result in each], total["none"]]
        outcomes.append((ranks, [loss.item() for loss in losses], gradients))
    return outcomes


def test_results_and_gradients_do_not_depend_on_the_fanout():
    outcomes = on_rank_zero(call_over_trees, WORKERS, [WORKERS, 1, 2, 3])
    (total, in_order, none), losses, gradients = outcomes[0]
    assert (total, none) == (sum(range(WORKERS)), None)
    assert in_order == [*reversed(range(WORKERS)), 2, 3]
    for ranks, other_losses, other_gradients in outcomes[1:]:
        assert ranks == outcomes[0][0]
        assert other_losses == losses
        for found, expected in zip(other_gradients, gradients, strict=True):
            assert all(map(torch.equal, found, expected))


@todist.auto_init_rpc()
def count_messages(fanout: int) -> int:
    transport, sent = current_transport(), []
    send, own = transport.send, transport.names[todist.get_rank()]

    def counted(worker: str, *args):
        sent.append(worker)
        return send(worker, *args)

    transport.send = counted
    todist.barrier()
    if todist.get_rank() == 0:
        todist.remote_sync_call(
            mean_loss,
            args=(make_model(), make_batch()),
            reducer=todist.sum_reducer,
            gradient="worker",
            fanout=fanout,
        )
    todist.barrier()
    return len([worker for worker in sent if worker != own])


@pytest.mark.parametrize(
    ("fanout", "expected"),
    [
        (3, [3, 2, 0, 0, 1, 0, 1, 0]),
        pytest.param(2, [2, 2, 1, 0, 0, 2, 0, 0], marks=pytest.mark.slow),
        pytest.param(7, [7] + [0] * 7, marks=pytest.mark.slow),
    ],
)
def test_a_worker_sends_to_at_most_fanout_others(fanout, expected):
    assert run_world(count_messages, WORKERS, fanout) == expected


def call_what_fails() -> list[str]:
    options = {"args": (make_batch(),), "fanout": 2}
    with pytest.raises(todist.RemoteError) as caught:
        todist.remote_sync_call(fail_on_last, **options)
    messages = [str(caught.value), caught.value.worker, caught.value.remote_traceback]
    with pytest.raises(todist.UserError) as refused:
        todist.remote_sync_call(refuse_on_last, **options)
    with pytest.raises(todist.RemoteError) as unequal:
        todist.remote_sync_call(as_long_as_the_rank, reducer=todist.sum_reducer, **options)
    with pytest.raises(TimeoutError) as late:
        todist.remote_sync_call(sleep_on_last, timeout=0.5, **options)
    return [*messages, str(refused.value), str(unequal.value), str(late.value)]


def test_errors_are_those_of_the_worker_that_raised_them():
    text, worker, traceback, refused, unequal, late = on_rank_zero(call_what_fails, WORKERS)
    assert worker == f"worker{WORKERS - 1}"
    assert f"{worker} (rank {WORKERS - 1} on " in text and "LookupError: no such item" in text
    assert text.count("traceback on") == 1
    assert "fail_on_last" in traceback and "in wait" not in traceback
    assert refused == "use another item."
    assert "results of different shapes cannot be reduced" in unequal  # within a group of workers
    assert "did not respond within" in late


class OneResponse(InProcess):
    """Gives every request the same response, or error."""

    def __init__(self, response: RemoteFailure | TimeoutError) -> None:
        super().__init__("worker0")
        self.response = response

    def send(self, worker: str, request: Request, timeout: float | None) -> Future:
        return completed(self.response)


def test_a_timeout_below_a_worker_is_one_of_the_call():
    request = ("worker0", WorkerRequest(max, [((1, 2), {})]))
    open_transport(OneResponse(TimeoutError("timed out")))
    failure = SubtreeRequest([request], 2, None).respond()
    todist.shutdown_rpc(graceful=False)
    assert isinstance(failure, RemoteFailure) and failure.timed_out
    assert failure.message.startswith("worker0 (rank 0") and "did not respond" in failure.message
    open_transport(OneResponse(failure))
    with pytest.raises(TimeoutError, match=r"^worker0 \(rank 0.*did not respond within"):
        todist.remote_sync_call(max, args=(1, 2), partitioner=0)
    todist.shutdown_rpc(graceful=False)


class ReceiversInOrder(InProcess):
    """Records the workers that get requests."""

    def __init__(self) -> None:
        super().__init__("worker0", "worker1", "worker2")
        self.receivers: list[str] = []

    def send(self, worker: str, request: Request, timeout: float | None) -> Future:
        self.receivers.append(worker)
        return super().send(worker, request, timeout)


def test_the_request_to_the_own_process_is_the_last_one(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    transport = ReceiversInOrder()
    open_transport(transport)
    calls = [(worker, (value, 0), {}) for worker, value in enumerate((7, 8, 9))]
    assert todist.remote_sync_call(max, partitioner=lambda: calls) == [7, 8, 9]
    todist.shutdown_rpc(graceful=False)
    assert transport.receivers == ["worker1", "worker2", "worker0"]


def changes_its_arguments(module: nn.Module, x: Tensor) -> Tensor:
    module.eval()
    module.calls = getattr(module, "calls", 0) + 1
    module.history.append(module.calls)
    module.running_mean.add_(1)
    module.weight.sum().backward()
    return x.add_(len(module.history))


def returns_what_cannot_be_pickled() -> Callable:
    return lambda: None


KEPT = torch.zeros(1)


def returns_what_it_keeps() -> Tensor:
    return KEPT


def sum_of_gradient(x: Tensor) -> Tensor:
    with torch.enable_grad():
        leaf = x.requires_grad_()
        (gradient,) = torch.autograd.grad(leaf.square().sum(), leaf)
    return gradient.sum()


class ExitsWhenUnpickled:
    def __reduce__(self) -> tuple:
        return sys.exit, (1,)


def product(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum()


def call_each(ranks: list[int]) -> list:
    """What each worker does with its arguments and results, on each of some ranks."""
    found = []
    for rank in ranks:
        module, x = nn.BatchNorm1d(2), torch.zeros(1)
        module.history = [0]
        result = todist.remote_sync_call(changes_its_arguments, args=(module, x), partitioner=rank)
        changed = [module.training, module.history, module.running_mean.tolist(), x.item()]
        changed.append(module.weight.grad)
        first = todist.remote_sync_call(returns_what_it_keeps, partitioner=rank).add_(1)
        second = todist.remote_sync_call(returns_what_it_keeps, partitioner=rank)
        leaf = torch.ones(2, requires_grad=True)
        todist.remote_sync_call(
            product, args=(leaf, leaf + 1), partitioner=rank, gradient="worker"
        ).backward()
        with torch.inference_mode():
            x = torch.ones(2)
            first += todist.remote_sync_call(sum_of_gradient, args=(x,), partitioner=rank).item()
        errors = []
        for function, args in [
            (returns_what_cannot_be_pickled, ()),
            (print, (lambda: None,)),
            (print, (ExitsWhenUnpickled(),)),
        ]:
            try:
                todist.remote_sync_call(function, args=args, partitioner=rank)
            except (todist.RemoteError, TypeError) as error:
                errors.append(type(error).__name__)
        found.append([result.item(), changed, first.item(), second.item(), leaf.grad, errors])
    return found


def test_a_request_to_the_own_process_copies_arguments_and_results_like_others():
    own, other = on_rank_zero(call_each, 2, [0, 1])
    assert str(own) == str(other)
    assert own[:4] == [2, [True, [0], [0, 0], 0, None], 1 + 4, 0] and own[4].tolist() == [3, 3]
    assert own[5] == ["RemoteError", "TypeError", "RemoteError"]


def wait_for(key: str) -> bool:
    return not wait_for_keys(current_transport().store, [key], timeout=50.0)


def time_out(ranks: list[int]) -> list:
    results: list = []
    for rank in ranks:
        waiting = {
            timeout: todist.remote_async_call(
                wait_for, args=(f"timed out/{rank}",), partitioner=rank, timeout=timeout
            )
            for timeout in (0.2, 0, None)
        }
        with pytest.raises(TimeoutError) as caught:
            waiting[0.2].wait()
        current_transport().store.set(f"timed out/{rank}", "yes")
        results += [str(caught.value), waiting[0].wait(), waiting[None].wait()]
    return results


def test_a_request_to_the_own_process_has_the_timeout_of_others():
    results = on_rank_zero(time_out, 2, [0, 1])
    assert results[1:3] == results[4:] == [True, True]
    for rank in (0, 1):
        assert results[3 * rank].startswith(f"worker{rank} (rank {rank}")
        assert "did not respond within 0.2 s: set a longer timeout" in results[3 * rank]


def without_elements(x: Tensor) -> Tensor:
    return torch.zeros(4, 0)[2:] if x.numel() == 0 else x


def part_for_worker_1(x: Tensor) -> list[tuple]:
    return [(1, (x[2:],), {})]


def send_views_without_elements() -> list:
    shapes = []
    view = torch.zeros(4, 0, 3)[1:]
    split = (todist.batch_partitioner, todist.exclusive_batch_partitioner, part_for_worker_1)
    for partitioner in (0, 1, *split):
        found = todist.remote_sync_call(without_elements, args=(view,), partitioner=partitioner)
        shapes.append([tuple(x.shape) for x in (found if isinstance(found, list) else [found])])
    return shapes


def test_views_without_elements_are_sent():
    """PyTorch aborts a process that receives one with a storage offset."""
    shapes = on_rank_zero(send_views_without_elements, 2)
    assert shapes == [[(2, 0)], [(2, 0)], [(2, 0)] * 2, [(2, 0)] * 3, [(2, 0)]]


ABANDON = """
import contextlib, sys, time, torch, metadist
def multiply(x, seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        x @ x
@metadist.auto_init_rpc()
def main(seconds):
    metadist.remote_sync_call(multiply, args=(torch.ones(900, 900), seconds), timeout=0.5)
caught, seconds = sys.argv[1] == "caught", float(sys.argv[2])
with contextlib.suppress(TimeoutError) if caught else contextlib.nullcontext():
    main(seconds)
print("ended")
"""


@pytest.mark.parametrize(
    ("how", "seconds", "status"),
    [("caught", 2, 0), pytest.param("uncaught", 60, 1, marks=pytest.mark.slow)],
)
def test_a_script_ends_without_an_abort_while_a_request_runs(tmp_path, how, seconds, status):
    """It waits for the request, but not after an uncaught error."""
    (tmp_path / "script.py").write_text(ABANDON)
    command = [sys.executable, "script.py", how, str(seconds)]
    result = subprocess.run(command, cwd=tmp_path, timeout=50, capture_output=True, text=True)
    assert result.returncode == status, result.stderr
    assert ("ended" in result.stdout) is (status == 0)
    assert ("TimeoutError: worker0" in result.stderr) is (status == 1)
    assert "terminate called" not in result.stderr


@todist.auto_init_rpc()
def leave_while_a_request_runs() -> None:
    todist.remote_async_call(call_again_after, args=(1.0,), partitioner=0)


def call_again_after(seconds: float) -> None:
    time.sleep(seconds)
    ENDED.append(todist.remote_sync_call(abs, args=(-3,), partitioner=0))


ENDED: list[int] = []


def test_a_shutdown_waits_for_the_requests_of_the_own_process(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    leave_while_a_request_runs()
    assert ENDED == [3]


@todist.auto_init_rpc()
def count_descriptors() -> int:
    todist.barrier()
    return len([*Path("/proc/self/fd").iterdir()])


def test_a_process_has_few_descriptors():
    """Rank zero has a connection to each of the others, which take about six descriptors each."""
    most = max(run_world(count_descriptors, 3))
    assert most < 60


def end(doomed: int, how: str) -> None:
    if todist.get_rank() == doomed:
        os.kill(os.getpid(), signal.SIGKILL if how == "dies" else signal.SIGSTOP)
    time.sleep(30)


def end_one_of_all(doomed: int, how: str) -> list[tuple]:
    return [(worker, (doomed, how), {}) for worker in range(1, WORKERS)]


def lose(doomed: int, how: str) -> tuple[str, int | None]:
    todist.init_rpc(ping_timeout=2.0)
    todist.barrier()
    if todist.get_rank() != 0:
        time.sleep(60)
    processes = [todist.remote_sync_call(os.getpid, partitioner=i) for i in range(1, WORKERS)]
    try:
        with pytest.raises(todist.WorkerLostError) as caught:
            todist.remote_sync_call(end, args=(doomed, how), partitioner=end_one_of_all, fanout=2)
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
    return str(caught.value), caught.value.rank


@pytest.mark.parametrize(
    ("doomed", "how"),
    [(1, "dies"), pytest.param(2, "freezes", marks=pytest.mark.slow), (7, "dies")],
)
def test_a_lost_worker_is_named_wherever_it_is_in_the_tree(doomed, how):
    message, rank = run_world(lose, WORKERS, doomed, how, may_fail=True)[0]
    assert rank == doomed and f"worker{doomed} (rank {doomed}" in message
