"""Hierarchical all-reduce for CPU tensors: within groups, between their first ranks, within groups.

Gloo reduces over a ring, so that a flat all-reduce of W ranks takes 2·(W-1) messages one after the
other. With √W groups of √W ranks, a reduction within the groups takes √W, an all-reduce of their
first ranks 2·(√W-1), and a broadcast over a tree log₂ √W: about 3·√W. Between nodes only their
first ranks exchange messages. NCCL has algorithms of its own and stays flat.
"""

import math
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from metadist.distributed.partitioners import balanced_bounds
from metadist.distributed.world import get_world_info

FLAT_UP_TO = 8
"""Ranks up to which an all-reduce stays flat, by default. A ring of 8 takes 14 messages, groups of
2 or 3 take 9, but transfer the vector 2.7 times as often."""


class _Level(NamedTuple):
    """A group that this rank belongs to, and the rank that takes part in the next level."""

    group: dist.ProcessGroup
    leader: int


class Hierarchy:
    """The groups of an all-reduce in several levels. Every rank of the world makes one.

    Args:
        levels: of `plan_levels`, not empty.
        timeout: seconds that a collective waits for the slowest rank.
    """

    def __init__(self, levels: Sequence[Sequence[Sequence[int]]], timeout: float) -> None:
        self._rank = get_world_info().rank
        self._levels = []
        for groups in levels:
            for ranks in groups:
                # Groups of one rank too: torch names a group after its ranks and the number of
                # groups that the process has, which must be the same for all members.
                if self._rank in ranks:
                    group = dist.new_group(
                        [*ranks],
                        timeout=timedelta(seconds=timeout),
                        backend="gloo",
                        use_local_synchronization=True,
                    )
                    assert isinstance(group, dist.ProcessGroup)  # this rank is a member
                    self._levels.append(_Level(group, ranks[0]))
        self._in_top = self._rank in levels[-1][0]

    def all_reduce(self, vector: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        """Reduce a CPU tensor in place over all ranks. All ranks call it."""
        below = self._levels[:-1] if self._in_top else self._levels
        for group, leader in below:
            dist.reduce(vector, leader, op, group=group)
        if self._in_top:
            dist.all_reduce(vector, op, group=self._levels[-1].group)
        for group, leader in reversed(below):
            dist.broadcast(vector, leader, group=group)


def plan_levels(nodes: Sequence[str], flat_up_to: int = FLAT_UP_TO) -> list[list[list[int]]]:
    """The groups of each level; the last level is one group. [] where a flat all-reduce is enough.

    The first level is the nodes, if there are several with more than one rank. A level with more
    than `flat_up_to` ranks on one node, or of one rank per node, is split into groups of about the
    square root of their number.

    Args:
        nodes: the node of each rank.
        flat_up_to: the largest number of ranks that stay one group.
    """
    ranks = [*range(len(nodes))]
    if len(nodes) <= flat_up_to:
        return []
    by_node: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        by_node.setdefault(node, []).append(rank)
    levels: list[list[list[int]]] = []
    parts = [*by_node.values()] if len(by_node) < len(nodes) else [ranks]
    leaders = _split(parts, flat_up_to, levels)
    if len(leaders) > 1:
        levels.append(leaders)
        leaders = _split([[ranks[0] for ranks in leaders]], flat_up_to, levels)
    return [*levels, leaders]


def _split(
    parts: list[list[int]], flat_up_to: int, levels: list[list[list[int]]]
) -> list[list[int]]:
    """Append levels until every part has at most `flat_up_to` ranks; the ranks that are left."""
    while max(map(len, parts)) > flat_up_to:
        groups = [_in_groups(ranks) for ranks in parts]
        levels.append([group for part in groups for group in part])
        parts = [[group[0] for group in part] for part in groups]
    return parts


def _in_groups(ranks: list[int]) -> list[list[int]]:
    bounds = balanced_bounds(len(ranks), round(math.sqrt(len(ranks))))
    return [ranks[start:stop] for start, stop in bounds]
