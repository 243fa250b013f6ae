"""Decorated functions: one call is partitioned, mapped and reduced."""

import pickle
import time

import pytest
import torch
from torch.futures import Future
from worlds import on_rank_zero

import metadist as todist


@todist.parallelize(partitioner=todist.batch_partitioner, reducer=todist.sum_reducer)
def total(batch: torch.Tensor, scale: float = 1.0) -> dict:
    """Sums."""
    return {"total": batch.sum() * scale, "ranks": 10.0 ** todist.get_rank()}


@todist.parallelize_async(partitioner=todist.batch_partitioner, reducer=todist.mean_reducer)
def mean(batch: torch.Tensor) -> torch.Tensor:
    return batch.mean()


@todist.parallelize_sync()
def by_default(batch: torch.Tensor) -> int:
    return todist.get_rank()


@todist.parallelize(partitioner=1, timeout=5.0)
def on_one(batch: torch.Tensor) -> tuple:
    return todist.get_rank(), batch.tolist()


@todist.rank_zero_only
@todist.parallelize(partitioner=todist.batch_partitioner, reducer=todist.sum_reducer)
def guarded(batch: torch.Tensor) -> torch.Tensor:
    return batch.sum()


@todist.parallelize(reducer=todist.mean_reducer, gradient="worker")
def loss(weight: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return (batch * weight.sum()).square().mean()


@todist.parallelize(
    partitioner=todist.dim_partitioner(0, exclusive=True, keepdim=False),
    reducer=todist.sum_reducer,
)
def nested(row: torch.Tensor) -> torch.Tensor:
    return total(row)["total"]


class Scaler:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    @todist.parallelize(reducer=todist.sum_reducer)
    def total(self, batch: torch.Tensor) -> torch.Tensor:
        return batch.sum() * self.scale


def call_them() -> dict:
    batch = torch.arange(7.0)
    future = mean(batch)
    assert isinstance(future, Future)
    weight = torch.tensor([1.0, 2.0], requires_grad=True)
    # The partitioner splits every tensor: here each weight goes with its item.
    loss(weight, torch.tensor([3.0, 3.0])).backward()
    return {
        "total": total(batch, scale=2.0)["total"].item(),
        "ranks": total(batch)["ranks"],
        "mean": future.wait().item(),
        "by default": list(by_default(batch)),
        "guarded": guarded(batch).item(),
        "nested": nested(torch.arange(12.0).reshape(4, 3)).item(),
        "method": Scaler(3.0).total(batch).item(),
        "wrapped": total.__wrapped__(batch)["total"].item(),
        "gradient": weight.grad.tolist(),
    }


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_decorated_function_is_partitioned_mapped_and_reduced(size):
    expected = {
        "total": 42.0,
        "ranks": sum(10.0**rank for rank in range(size)),
        "mean": 3.0,
        "by default": list(range(size)),
        "guarded": 21.0,
        "nested": 66.0,
        "method": 63.0,
        "wrapped": 21.0,
        # One process: the mean of (3 * 3)^2 twice, d/dw = 2 * 9 * 3. Else each weight is alone
        # with its item: (3 w)^2 / 2, d/dw = 9 w.
        "gradient": [54.0, 54.0] if size == 1 else [9.0, 18.0],
    }
    assert on_rank_zero(call_them, size) == expected


@todist.parallelize_async(reducer=todist.mean_reducer, gradient="worker")
def later_loss(weight: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return (batch * weight.sum()).square().mean()


def differentiate_later() -> list[float]:
    weight = torch.tensor([1.0, 2.0], requires_grad=True)
    later_loss(weight, torch.tensor([3.0, 3.0])).wait().backward()
    return weight.grad.tolist()


def test_a_call_that_returns_a_future_has_gradients_of_the_workers():
    assert on_rank_zero(differentiate_later, 1) == [54.0, 54.0]


@todist.parallelize_sync(partitioner=1, timeout=0.5)
def sleep_sync(seconds: float) -> None:
    time.sleep(seconds)


@todist.parallelize_async(partitioner=1, timeout=0.5)
def sleep_async(seconds: float) -> None:
    time.sleep(seconds)


def call_the_sleeping() -> None:
    with pytest.raises(TimeoutError):
        sleep_sync(3.0)
    with pytest.raises(TimeoutError):
        sleep_async(3.0).wait()


def test_a_call_takes_no_longer_than_its_timeout():
    on_rank_zero(call_the_sleeping, 2)


def test_a_workers_number_serves_as_partitioner():
    assert on_rank_zero(on_one, 2, torch.tensor([1.0, 2.0])) == (1, [1.0, 2.0])


def test_decorated_functions_pickle_by_name_and_keep_name_and_signature():
    for function in (total, mean, Scaler.total):
        assert pickle.loads(pickle.dumps(function)) is function
    assert total.__name__ == "total" and total.__doc__ == "Sums."
    assert repr(total) == f"<parallelized {__name__}.total>"


def call_a_nested_function() -> list[str]:
    @todist.parallelize()
    def inner(batch: torch.Tensor) -> torch.Tensor:
        return batch

    messages = []
    for function in (inner, todist.parallelize()(lambda batch: batch)):
        with pytest.raises(TypeError) as caught:
            function(torch.zeros(2))
        messages.append(str(caught.value))
    return messages


def test_a_function_that_workers_cannot_find_is_refused_with_a_sentence():
    assert all("top level" in message for message in on_rank_zero(call_a_nested_function, 2))


@pytest.mark.parametrize(
    "decorator", [todist.parallelize, todist.parallelize_sync, todist.parallelize_async]
)
@pytest.mark.parametrize(
    "arguments", [(torch.zeros(2),), (torch.nn.Identity(),), (torch.nn.Identity(), torch.zeros(2))]
)
def test_a_decorator_without_its_brackets_is_refused(decorator, arguments):
    @decorator
    def forgotten(*arguments):
        return arguments

    with pytest.raises(TypeError, match=r"write @parallelize\(\) above a function"):
        forgotten(*arguments)


def test_outside_of_a_world_a_sentence_says_what_is_missing():
    with pytest.raises(RuntimeError, match="@auto_init_rpc"):
        total(torch.zeros(2))
