"""Shards know what they hold, and plain triples still serve."""

import pickle

import pytest

import metadist as todist
from metadist.distributed.shards import as_shards


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
