"""Who gets which items: balanced, in order, nothing lost, whatever the arguments' shape."""

import pickle
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from worlds import on_rank_zero

import metadist as todist
from metadist.distributed.partitioners import as_shards, balanced_bounds

LENGTHS = [0, 1, 2, 3, 5, 7, 15, 16, 17, 100]


@pytest.fixture
def world(monkeypatch):
    """Sets the world size that this process sees."""

    def of(size: int) -> None:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", str(size))

    return of


def assert_equal(left: torch.Tensor, right: torch.Tensor) -> None:
    torch.testing.assert_close(left, right, rtol=0, atol=0)


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("length", LENGTHS)
def test_bounds_are_those_of_numpy(length, workers):
    expected = [list(part) for part in np.array_split(np.arange(length), workers)]
    assert [list(range(*bounds)) for bounds in balanced_bounds(length, workers)] == expected


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("length", LENGTHS)
def test_a_batch_is_split_as_torch_splits_tensors(world, length, workers):
    world(workers)
    batch = torch.randn(length, 2)
    shards = todist.batch_partitioner(batch)
    expected = {
        worker: part for worker, part in enumerate(batch.tensor_split(workers)) if len(part)
    }
    assert [shard[0] for shard in shards] == list(expected)
    for worker, (part,), kwargs in shards:
        assert_equal(part, expected[worker])
        assert kwargs == {}
    assert [shard.size for shard in shards] == [len(part) for part in expected.values()]
    assert (
        max(shard.size for shard in shards) - min(shard.size for shard in shards) <= 1
        if (shards)
        else length == 0
    )


@pytest.mark.parametrize("keepdim", [True, False])
@pytest.mark.parametrize(("length", "workers"), [(1, 2), (5, 2), (7, 3), (2, 3), (12, 4)])
def test_exclusive_shards_hold_one_item_each_in_order(world, length, workers, keepdim):
    world(workers)
    batch = torch.randn(length, 3, 4)
    shards = todist.dim_partitioner(0, exclusive=True, keepdim=keepdim)(batch)
    assert len(shards) == length
    assert all(shard.size == 1 for shard in shards)
    for index, (_, (item,), _) in enumerate(shards):
        assert_equal(item, batch[index : index + 1] if keepdim else batch[index])
    owners = [
        worker
        for worker, part in enumerate(np.array_split(np.arange(length), workers))
        for _ in part
    ]
    assert [shard[0] for shard in shards] == owners


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2, -3])
def test_every_dimension_can_be_split(world, dim):
    world(2)
    batch = torch.randn(5, 6, 7)
    parts = [args[0] for _, args, _ in todist.dim_partitioner(dim)(batch)]
    for part, expected in zip(parts, batch.tensor_split(2, dim), strict=True):
        assert_equal(part, expected)
    items = [
        args[0] for _, args, _ in todist.dim_partitioner(dim, exclusive=True, keepdim=False)(batch)
    ]
    for item, expected in zip(items, batch.unbind(dim), strict=True):
        assert_equal(item, expected)


class Episode(NamedTuple):
    support: torch.Tensor
    label: str


def test_nested_tensors_are_split_and_everything_else_is_the_same_object(world):
    world(2)
    model = torch.nn.Linear(2, 2)
    x = torch.arange(6.0).reshape(3, 2)
    shards = todist.batch_partitioner(
        model, [x, {"y": x + 10, "n": 4}], 7, None, episode=Episode(x + 20, "e"), steps=(1, x + 30)
    )
    for (worker, args, kwargs), (start, stop) in zip(shards, [(0, 2), (2, 3)], strict=True):
        assert worker == (0 if start == 0 else 1)
        assert args[0] is model and args[2:] == (7, None)
        assert type(args[1]) is list and args[1][1]["n"] == 4
        assert_equal(args[1][0], x[start:stop])
        assert_equal(args[1][1]["y"], x[start:stop] + 10)
        assert type(kwargs["episode"]) is Episode and kwargs["episode"].label == "e"
        assert_equal(kwargs["episode"].support, x[start:stop] + 20)
        assert kwargs["steps"][0] == 1
        assert_equal(kwargs["steps"][1], x[start:stop] + 30)


def test_parts_keep_their_graph(world):
    world(3)
    batch = torch.randn(4, 2, requires_grad=True)
    sum(args[0].square().sum() for _, args, _ in todist.batch_partitioner(batch)).backward()
    assert_equal(batch.grad, 2 * batch.detach())


def test_single_items_with_a_graph_may_be_changed_in_place(world):
    world(2)
    batch = torch.randn(3, 2, requires_grad=True)
    partitioner = todist.dim_partitioner(0, exclusive=True, keepdim=False)
    sum(args[0].mul_(3).sum() for _, args, _ in partitioner(batch.clone())).backward()
    assert_equal(batch.grad, torch.full((3, 2), 3.0))


@pytest.mark.parametrize(
    ("partitioner", "arguments", "message"),
    [
        (todist.batch_partitioner, (torch.zeros(3), torch.zeros(4, 2)), "[3, 4]"),
        (todist.batch_partitioner, (1, "no tensor"), "no tensor"),
        (todist.batch_partitioner, (torch.zeros(()),), "no dimension 0"),
        (todist.dim_partitioner(2), (torch.zeros(3, 4),), "(3, 4)"),
        (todist.dim_partitioner(-3), (torch.zeros(3, 4),), "no dimension -3"),
    ],
)
def test_what_cannot_be_split_is_refused_in_one_line(partitioner, arguments, message):
    with pytest.raises(todist.UserError) as caught:
        partitioner(*arguments)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_impossible_options_are_refused_in_one_line():
    for make in (
        lambda: todist.dim_partitioner(0, keepdim=False),
        lambda: todist.dim_partitioner(0, workers=[]),
        lambda: todist.dim_partitioner(0, workers="worker1"),
        lambda: todist.dim_partitioner("0"),
        lambda: todist.dim_partitioner(True),
    ):
        with pytest.raises(todist.UserError) as caught:
            make()
        assert "\n" not in str(caught.value)


def test_partitioners_pickle_compare_and_print_themselves():
    made = todist.dim_partitioner(1, exclusive=True, keepdim=False, workers=[1, "worker0"])
    same = todist.dim_partitioner(1, exclusive=True, keepdim=False, workers=(1, "worker0"))
    assert made == same and hash(made) == hash(same)
    assert made != todist.dim_partitioner(1, exclusive=True, keepdim=False)
    assert repr(todist.dim_partitioner(np.int64(1))) == repr(todist.dim_partitioner(1))
    assert todist.batch_partitioner == todist.dim_partitioner(0)
    assert todist.exclusive_batch_partitioner == todist.dim_partitioner(0, exclusive=True)
    assert todist.batch_partitioner != todist.exclusive_batch_partitioner
    assert pickle.loads(pickle.dumps(made)) == made
    assert repr(made) == (
        "DimPartitioner(dim=1, exclusive=True, keepdim=False, workers=(1, 'worker0'))"
    )


def test_the_world_is_counted_when_the_call_is_made(world):
    partitioner = todist.dim_partitioner(0)
    batch = torch.zeros(12, 1)
    for size in (1, 2, 3, 4):
        world(size)
        assert [shard[0] for shard in partitioner(batch)] == list(range(size))


def test_chosen_workers_share_the_work_in_their_order(world):
    world(4)
    batch = torch.arange(5.0)
    shards = todist.dim_partitioner(0, workers=["worker3", 1])(batch)
    assert [(shard[0], shard[1][0].tolist()) for shard in shards] == [
        ("worker3", [0.0, 1.0, 2.0]),
        (1, [3.0, 4.0]),
    ]


@some.composite
def _batches(draw):
    """Tensors that share the length of one dimension, of any types and shapes."""
    dim = draw(some.integers(-3, 2))
    length = draw(some.integers(0, 9))
    tensors = []
    for _ in range(draw(some.integers(1, 3))):
        shape = draw(some.lists(some.integers(0, 3), min_size=3, max_size=3))
        shape[dim] = length
        dtype = draw(some.sampled_from(DTYPES))
        count = int(np.prod(shape))
        tensors.append(torch.arange(count).reshape(shape).to(dtype))
    return dim, length, tensors


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool)


@settings(max_examples=200, deadline=None)
@given(_batches(), some.integers(1, 7), some.booleans(), some.booleans())
def test_any_tensors_come_back_whole_and_in_order(batches, workers, exclusive, keepdim):
    dim, length, tensors = batches
    keepdim = keepdim or not exclusive
    chosen = [f"worker{number}" for number in range(workers)]
    partitioner = todist.dim_partitioner(dim, exclusive=exclusive, keepdim=keepdim, workers=chosen)
    shards = partitioner(tensors[0], "the same", rest={"more": tensors[1:]})
    assert sum(shard.size for shard in shards) == length
    order = [chosen.index(worker) for worker, _, _ in shards]
    assert order == sorted(order)
    held = [sum(s.size for s in shards if s[0] == worker) for worker in chosen]
    assert max(held) - min(held) <= 1
    for position, whole in enumerate(tensors):
        parts = [args[0] if position == 0 else kwargs["rest"]["more"][position - 1]
                 for _, args, kwargs in shards]  # fmt: skip
        assert all(part.dtype is whole.dtype for part in parts)
        if parts:
            merged = torch.cat(parts, dim) if keepdim else torch.stack(parts, dim)
            assert torch.equal(merged, whole)
        else:
            assert length == 0
    assert all(args[1] == "the same" for _, args, _ in shards)


def call_with_no_items() -> list:
    nothing = torch.zeros(0, 2)
    without = todist.remote_sync_call(torch.square, args=(nothing,))
    future = todist.remote_async_call(torch.square, args=(nothing,)).wait()
    with pytest.raises(ValueError, match="no shards"):
        todist.remote_sync_call(torch.square, args=(nothing,), reducer=todist.mean_reducer)
    return [list(without), list(future)]


def test_no_items_make_no_shards_and_nothing_to_reduce():
    assert on_rank_zero(call_with_no_items, 2) == [[], []]


def test_a_shard_is_a_triple_that_knows_its_size():
    shard = todist.Shard(1, (2,), {"a": 3}, size=4)
    assert shard == (1, (2,), {"a": 3}) and shard.size == 4
    assert todist.Shard("worker1") == ("worker1", (), {}) and todist.Shard(0).size == 1
    again = pickle.loads(pickle.dumps(shard))
    assert type(again) is todist.Shard and again == shard and again.size == 4


def test_plain_triples_hold_one_item_and_shards_stay_as_they_are():
    shard = todist.Shard(0, (), {}, size=3)
    plain, kept = as_shards([(1, (5,), {}), shard])
    assert plain == (1, (5,), {}) and plain.size == 1 and kept is shard


@pytest.mark.parametrize("triple", [(1, ()), [1, (), {}], 5])
def test_what_is_no_triple_is_refused(triple):
    with pytest.raises(TypeError, match="must return a list of"):
        as_shards([triple])


def test_results_are_a_list_with_sizes():
    results = todist.ShardResults(["a", "b"], [2, 1])
    assert results == ["a", "b"] and results.sizes == [2.0, 1.0]
    assert todist.ShardResults(["a", "b"]).sizes == [1.0, 1.0]


@pytest.mark.parametrize("keepdim", [True, False])
def test_one_shard_per_worker_holds_the_same_items(keepdim):
    partitioner = todist.dim_partitioner(1, exclusive=True, keepdim=keepdim, workers=[2, "b"])
    items = torch.arange(14).view(2, 7)
    merged = partitioner.with_one_shard_per_worker()(items, factor=3)
    assert [(shard[0], shard[2], shard.size) for shard in merged] == [
        (2, {"factor": 3}, 4),
        ("b", {"factor": 3}, 3),
    ]
    single = partitioner(items, factor=3)
    for worker, (tensor,), _ in merged:
        own = [args[0].reshape(2, 1) for name, args, _ in single if name == worker]
        assert torch.equal(tensor, torch.cat(own, 1))
