"""Reducers against sums over all items, and sums that do not depend on how they are split."""

import pickle
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from worlds import on_rank_zero

import metadist as todist
from metadist.distributed.reducers import (
    LinearReducer,
    MeanReducer,
    SumReducer,
    finish_sum,
    leaf_dtypes,
    weighted_sum,
)


class Metrics(NamedTuple):
    loss: torch.Tensor
    accuracy: float


def items(number: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(number, 3, generator=torch.Generator().manual_seed(0), dtype=dtype)


@pytest.mark.parametrize("sizes", [[15], [8, 7], [5, 5, 5], [1, 2, 12], [4, 4, 4, 3]])
def test_the_mean_of_uneven_shards_is_the_mean_of_all_items(sizes):
    everything = items(15)
    parts = everything.split(sizes)
    means = todist.ShardResults([part.mean(0) for part in parts], sizes)
    torch.testing.assert_close(
        todist.mean_reducer(means), everything.mean(0), rtol=1e-14, atol=1e-15
    )
    sums = todist.ShardResults([part.sum(0) for part in parts], sizes)
    torch.testing.assert_close(todist.sum_reducer(sums), everything.sum(0), rtol=1e-14, atol=1e-14)


def test_reducers_work_leaf_by_leaf_and_keep_the_structure():
    def result(value: float) -> dict:
        return {
            "metrics": Metrics(torch.tensor(value), value * 2),
            "pair": (value, [torch.full((2,), value)]),
            "count": int(value),
            "right": value > 2,
            "nothing": None,
        }

    results = todist.ShardResults([result(1.0), result(4.0)], [2, 1])
    mean = todist.mean_reducer(results)
    assert list(mean) == ["metrics", "pair", "count", "right", "nothing"]
    assert type(mean["metrics"]) is Metrics
    assert mean["metrics"].loss.item() == 2.0 and mean["metrics"].accuracy == 4.0
    assert mean["metrics"].loss.dtype is torch.float32
    assert mean["pair"][0] == 2.0 and mean["pair"][1][0].tolist() == [2.0, 2.0]
    assert type(mean["pair"]) is tuple and type(mean["pair"][1]) is list
    assert mean["count"] == 2.0 and mean["right"] == pytest.approx(1 / 3)
    assert mean["nothing"] is None
    total = todist.sum_reducer(results)
    assert total["metrics"] == Metrics(torch.tensor(5.0), 10.0)
    assert total["count"] == 5 and total["right"] == 1 and total["nothing"] is None


def test_tensors_of_whole_numbers_and_flags():
    results = todist.ShardResults(
        [
            {"n": torch.tensor([1, 2]), "flag": torch.tensor([True, True])},
            {"n": torch.tensor([3, 5]), "flag": torch.tensor([True, False])},
        ],
        [1, 3],
    )
    total = todist.sum_reducer(results)
    assert total["n"].tolist() == [4, 7] and total["n"].dtype is torch.int64
    assert total["flag"].tolist() == [2, 1]
    mean = todist.mean_reducer(results)
    assert mean["n"].tolist() == [2.5, 4.25] and mean["flag"].tolist() == [1.0, 0.25]
    assert [type(todist.sum_reducer(flags)) for flags in ([True], [True, True])] == [int, int]


@pytest.mark.parametrize(
    "results",
    [
        [],
        [(1.0, 2.0), (1.0,)],
        [{"a": 1.0}, {"b": 1.0}],
        [{"a": 1.0}, {"a": {"b": 1.0}}],
        [{"a": None}, {"a": torch.ones(1)}],
        [{"a": torch.ones(1)}, {"a": None}],
    ],
)
@pytest.mark.parametrize("reducer", [todist.mean_reducer, todist.sum_reducer])
def test_no_results_and_different_structures_are_refused(reducer, results):
    with pytest.raises(ValueError, match=r"no results|different structures"):
        reducer(results)


@pytest.mark.parametrize("result", [1.0, 1, np.ones(2), torch.ones(2)])
def test_a_mean_of_no_items_is_refused(result):
    with pytest.raises(todist.UserError, match="sizes of all shards are 0"):
        todist.mean_reducer(todist.ShardResults([result, result], [0, 0]))


def test_reducers_pass_derivatives_on():
    parts = [part.clone().requires_grad_() for part in items(5).split([3, 2])]
    losses = todist.ShardResults([part.square().mean() for part in parts], [3, 2])
    todist.mean_reducer(losses).backward()
    whole = items(5).requires_grad_()
    whole.square().mean().backward()
    torch.testing.assert_close(torch.cat([part.grad for part in parts]), whole.grad)


def test_reducers_pickle_compare_and_print_themselves():
    for reducer in (todist.mean_reducer, todist.sum_reducer):
        assert pickle.loads(pickle.dumps(reducer)) == reducer
    assert todist.mean_reducer != todist.sum_reducer
    assert repr(todist.mean_reducer) == "MeanReducer()"


def reduce_in_groups(reducer, results: list, groups: list[list[int]]):
    """The reduction as workers do it: each adds up its own results, then the sums are added."""
    ones = [1.0] * len(results)
    weights = reducer.weights(ones)
    partial = [
        weighted_sum([results[i] for i in mine], [weights[i] for i in mine]) for mine in groups
    ]
    total = weighted_sum(partial, [1] * len(partial))
    return finish_sum(total, reducer.divisor(ones), leaf_dtypes(results[0]))


@pytest.mark.parametrize("reducer", [todist.mean_reducer, todist.sum_reducer])
@pytest.mark.parametrize("number", [2, 15, 32])
def test_float32_results_add_up_to_the_same_bits_however_they_are_grouped(reducer, number):
    results = [{"x": item * 10 ** (i % 5)} for i, item in enumerate(items(number, torch.float32))]
    generator = torch.Generator().manual_seed(1)
    whole = reducer(results)["x"]
    assert whole.dtype is torch.float32
    # An independent reference: the exact sum of rational numbers, divided, rounded once.
    exact = [
        sum(map(Fraction, column))
        for column in zip(*(r["x"].tolist() for r in results), strict=True)
    ]
    divisor = number if reducer is todist.mean_reducer else 1
    assert whole.tolist() == [torch.tensor(float(each / divisor)).item() for each in exact]
    for _ in range(200):
        owners = torch.randint(0, 4, (number,), generator=generator).tolist()
        groups = [[i for i in range(number) if owners[i] == owner] for owner in set(owners)]
        assert torch.equal(reduce_in_groups(reducer, results, groups)["x"], whole)


@pytest.mark.parametrize("number", [3, 4, 5, 6, 7, 10, 25, 32])
def test_ties_are_rounded_alike_however_items_are_grouped(number):
    """Gradients of equal magnitude often have means halfway between two float32 values."""
    generator = torch.Generator().manual_seed(number)
    values = torch.randn(number, 200_000, generator=generator) * 1e-3
    values = (values * 2**20).round() / 2**20  # as of sums of few products: short mantissas
    results = list(values)
    whole = todist.mean_reducer(results)
    for workers in (2, 3, 4):
        groups = [list(range(number))[rank::workers] for rank in range(workers)]
        groups = [mine for mine in groups if mine]
        assert torch.equal(reduce_in_groups(todist.mean_reducer, results, groups), whole)


REAL = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@settings(max_examples=200, deadline=None)
@given(
    some.lists(some.integers(1, 6), min_size=1, max_size=6),
    some.lists(some.integers(0, 3), min_size=0, max_size=3),
    some.sampled_from(REAL),
    some.integers(0, 2**32 - 1),
)
def test_any_split_of_any_shape_and_type_reduces_as_the_whole(sizes, shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    # Eighths: their sums are exact, so the whole has one right answer.
    whole = torch.randint(-16, 17, (sum(sizes), *shape), generator=generator).double() / 8
    parts = [part.mean(0) for part in whole.split(sizes)]
    mean = todist.mean_reducer(todist.ShardResults(parts, sizes))
    torch.testing.assert_close(mean, whole.mean(0), rtol=1e-14, atol=1e-14)
    total = SumReducer(of_items=True)(todist.ShardResults(parts, sizes))
    torch.testing.assert_close(total, whole.sum(0), rtol=1e-13, atol=1e-13)
    items = [{"x": item.to(dtype), "n": 1} for item in whole]
    summed = todist.sum_reducer(items)
    assert summed["x"].dtype is dtype and summed["n"] == len(whole)
    assert torch.equal(summed["x"], whole.sum(0).to(dtype))


def one_item(item: torch.Tensor) -> dict:
    return {"value": item.sin(), "right": item > 0, "n": 1}


def reduce_in_a_world() -> list[dict]:
    """By the mean and by the sum."""
    return [
        todist.remote_sync_call(
            one_item,
            args=(items(15, torch.float32),),
            partitioner=todist.dim_partitioner(0, exclusive=True, keepdim=False),
            reducer=reducer,
        )
        for reducer in (todist.mean_reducer, todist.sum_reducer)
    ]


def test_the_same_bits_in_worlds_of_one_two_and_three():
    sines = items(15, torch.float32).sin().double()
    flags = (items(15, torch.float32) > 0).double()
    for size in (1, 2, 3):
        for over, result in zip((15, 1), on_rank_zero(reduce_in_a_world, size), strict=True):
            assert torch.equal(result["value"], (sines.sum(0) / over).float())
            torch.testing.assert_close(result["right"].double(), flags.sum(0) / over)
            assert result["n"] == pytest.approx(15 / over)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_means_of_integers_are_float64(dtype):
    large = {torch.int64: 2**40, torch.int32: 2**24, torch.uint8: 200}[dtype]
    values = [torch.tensor([large + 1, 3], dtype=dtype), torch.tensor([large + 2, 4], dtype=dtype)]
    mean = todist.mean_reducer(todist.ShardResults(values, [1, 2]))
    exact = np.stack([value.numpy().astype(np.float64) for value in values])
    assert mean.dtype is torch.float64  # float32 has no 2**24 + 1
    assert mean.tolist() == (np.array([1.0, 2.0]) @ exact / 3).tolist()


def test_a_sum_with_float_weights_makes_floats_of_integers():
    results = [{"n": torch.tensor([2**24 + 1])}, {"n": torch.tensor([1])}]
    total = weighted_sum(results, [1.0, 0.0])["n"]
    assert total.dtype is torch.float64 and total.item() == 2**24 + 1
    assert weighted_sum(results, [1, 2])["n"].tolist() == [2**24 + 3]


def test_the_mean_of_complex_numbers_is_complex():
    shards = [torch.tensor([1 + 2j]), torch.tensor([3 + 4j])]
    assert todist.mean_reducer(shards).tolist() == [2 + 3j]


@pytest.mark.parametrize("reducer", [todist.mean_reducer, todist.sum_reducer])
def test_results_of_different_shapes_are_refused(reducer):
    with pytest.raises(ValueError, match=r"different shapes cannot be reduced: \(1,\) and \(2,\)"):
        reducer([torch.ones(2), torch.ones(1)])
    with pytest.raises(ValueError, match="different shapes"):
        reducer([torch.ones(2), 1.0])


@pytest.mark.parametrize("leaf", ["text", torch.Size([2]), object()])
def test_what_is_no_number_is_refused(leaf):
    with pytest.raises(TypeError, match=f"results hold {type(leaf).__name__}"):
        todist.sum_reducer([{"a": leaf}, {"a": leaf}])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_sums_of_small_integers_do_not_overflow(dtype):
    largest = torch.iinfo(dtype).max
    assert todist.sum_reducer([torch.tensor(largest, dtype=dtype)] * 3).item() == 3 * largest
    assert todist.mean_reducer([torch.tensor(largest, dtype=dtype)] * 3).item() == largest


class Doubled(MeanReducer):
    """Gives the first shard a double weight."""

    def weights(self, sizes):
        return [2.0 * sizes[0], *map(float, sizes[1:])]


@pytest.mark.parametrize(
    ("reducer", "equally"),
    [
        (MeanReducer(), True),
        (SumReducer(of_items=True), True),
        (SumReducer(), False),
        (Doubled(), False),
        (LinearReducer(), False),
    ],
)
def test_a_reducer_knows_whether_the_split_matters(reducer, equally):
    assert reducer.weights_items_equally == equally
    if equally:
        items = torch.tensor([1.0, 5.0, 9.0])
        alone = reducer(todist.ShardResults(list(items), [1, 1, 1]))
        split = reducer(todist.ShardResults([items[:2].mean(), items[2]], [2, 1]))
        assert torch.equal(alone, split)


class DoubledSum(SumReducer):
    """A sum of the user's own, in which the first shard counts twice."""

    def weights(self, sizes):
        return [2.0 * sizes[0], *map(float, sizes[1:])]


def test_a_sum_of_the_users_own_depends_on_the_split():
    assert not DoubledSum(of_items=True).weights_items_equally


def test_arrays_and_plain_lists_are_reduced_as_tensors_and_shards_are():
    halves = [np.array([0.25]), np.array([0.5])]
    assert todist.mean_reducer(halves).tolist() == [0.375]
    assert SumReducer(of_items=True)([torch.tensor(1.0), torch.tensor(2.0)]) == 3
