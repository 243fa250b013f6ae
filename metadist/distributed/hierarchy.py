"""Hierarchical all-reduce for CPU tensors: a reduction within groups, an all-reduce of the groups'
first ranks, and a broadcast within the groups.

Gloo reduces over a ring, so a flat all-reduce of W ranks takes 2·(W-1) messages one after the
other. With √W groups of √W ranks, the reduction takes √W messages, the all-reduce of the first
ranks 2·(√W-1), and the broadcast over a tree log₂ √W: about 3·√W in total. Between nodes, only
their first ranks exchange messages. NCCL has its own algorithms and is called directly.
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
"""The default number of ranks up to which an all-reduce is flat. A ring of 8 takes 14 messages;
groups of 2 or 3 take 9, but transfer the vector 2.7 times as often."""


class _Level(NamedTuple):
    """A group that this rank belongs to, and the rank that takes part in the next level."""

    group: dist.ProcessGroup
    leader: int


class Hierarchy:
    """The groups of an all-reduce in several levels. Every rank creates one.

    Args:
        levels: the groups of each level from `plan_levels`, not empty.
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
        lower_levels = self._levels[:-1] if self._in_top else self._levels
        for group, leader in lower_levels:
            dist.reduce(vector, leader, op, group=group)
        if self._in_top:
            dist.all_reduce(vector, op, group=self._levels[-1].group)
        for group, leader in reversed(lower_levels):
            dist.broadcast(vector, leader, group=group)


def plan_levels(nodes: Sequence[str], flat_up_to: int = FLAT_UP_TO) -> list[list[list[int]]]:
    """The groups of each level; the last level has one group. [] if a flat all-reduce is enough.

    The lower levels group the ranks of each node, the upper levels the nodes' first ranks. More
    than `flat_up_to` ranks are split into groups of about the square root of their number.

    Args:
        nodes: the node of each rank.
        flat_up_to: the largest number of ranks that form one group.
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
    """Append levels until each part has at most `flat_up_to` ranks, and return these parts."""
    while max(map(len, parts)) > flat_up_to:
        groups = [_in_groups(ranks) for ranks in parts]
        levels.append([group for part in groups for group in part])
        parts = [[group[0] for group in part] for part in groups]
    return parts


def _in_groups(ranks: list[int]) -> list[list[int]]:
    bounds = balanced_bounds(len(ranks), round(math.sqrt(len(ranks))))
    return [ranks[start:stop] for start, stop in bounds]
