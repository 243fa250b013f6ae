"""Groups of a hierarchical all-reduce, and its results against a flat one."""

import math
import os

import pytest
import torch
from worlds import run_world

import metadist as todist
from metadist.distributed import collectives
from metadist.distributed.hierarchy import plan_levels

NODES = {
    "one node": ["a"] * 20,
    "a rank per node": [f"node{rank}" for rank in range(33)],
    "nodes of 8": [f"node{rank // 8}" for rank in range(1024)],
    "large nodes": ["a"] * 64 + ["b"] * 64,
    "unequal nodes": ["a"] * 7 + ["b"] * 3 + ["c"],
    "ranks dealt in turn": ["a", "b"] * 8,
}


def test_up_to_eight_workers_are_one_group():
    for size in range(1, 9):
        assert plan_levels(["a", "b"] * (size // 2) + ["c"] * (size % 2)) == []


@pytest.mark.parametrize("nodes", NODES.values(), ids=NODES)
def test_first_ranks_of_a_level_are_the_next_level(nodes):
    levels = plan_levels(nodes)
    left = [*range(len(nodes))]
    for groups in levels:
        assert sorted(rank for group in groups for rank in group) == left
        left = sorted(group[0] for group in groups)
    assert left == [0]
    assert len(levels) > 1


@pytest.mark.parametrize(("size", "expected"), [(9, 3), (16, 4), (64, 8)])
def test_one_node_has_groups_of_about_the_square_root(size, expected):
    levels = plan_levels(["a"] * size)
    assert [len(groups) for groups in levels] == [expected, 1]
    assert {len(group) for group in levels[0]} == {math.isqrt(size)}


def test_nodes_exchange_one_rank_each():
    first, last = plan_levels(["a"] * 8 + ["b"] * 8)
    assert first == [[*range(8)], [*range(8, 16)]]
    assert last == [[0, 8]]


def reduce_in_levels(flat_up_to: int) -> tuple:
    rank, size = todist.get_rank(), todist.get_world_size()
    generator = torch.Generator().manual_seed(rank)
    vector = torch.randn(1000, generator=generator).double()
    collectives.init_process_group("gloo", flat_up_to=flat_up_to, shared_memory=False)
    assert "TORCH_GLOO_LAZY_INIT" not in os.environ
    results = [collectives.all_reduce(vector, op) for op in ("sum", "max", "min")]
    collectives.barrier()
    gathered = collectives.all_gather(torch.full((rank,), float(rank)))
    copies = collectives.broadcast(vector, size - 1)
    collectives.destroy_process_group()
    return results, [len(part) for part in gathered], copies


@pytest.mark.parametrize("size", [3, pytest.param(12, marks=pytest.mark.slow)])
def test_results_have_the_bits_of_a_flat_all_reduce(size):
    flat = run_world(reduce_in_levels, size, size)
    found = run_world(reduce_in_levels, size, 2)
    for (results, lengths, copies), (expected, *_) in zip(found, flat, strict=True):
        assert all(map(torch.equal, results, expected))
        assert lengths == [*range(size)]
        assert torch.equal(copies, flat[0][2])
