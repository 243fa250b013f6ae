"""Collectives on tensors and nested structures of them, over Gloo or NCCL, beside RPC or alone."""

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Literal, TypeVar

import optree
import torch
import torch.distributed as dist
from torch import Tensor

from metadist.distributed.lost import SomePeerLost
from metadist.distributed.meeting import MEETING_TIMEOUT, meet
from metadist.distributed.rpc import bound_to_loopback
from metadist.distributed.world import get_world_info
from metadist.errors import UserError

T = TypeVar("T")

COLLECTIVE_TIMEOUT = 300.0
"""Seconds that a collective waits for the slowest rank."""


@contextlib.contextmanager
def _peers() -> Iterator[None]:
    """Around a collective: what Gloo and NCCL say of a rank that is gone, as `PeerLost`."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise SomePeerLost(f"a rank left or stopped during a collective ({reason}).") from None


def init_process_group(
    backend: Literal["gloo", "nccl"] | None = None,
    *,
    timeout: float = COLLECTIVE_TIMEOUT,
    meeting_timeout: float = MEETING_TIMEOUT,
) -> None:
    """Open the world's process group. Every rank calls it.

    Args:
        backend: Default: NCCL for GPUs with Gloo for the CPU where every rank has a GPU of its
            own, else Gloo.
        timeout: seconds that a collective waits for the slowest rank.
        meeting_timeout: seconds that ranks may arrive apart.
    """
    info = get_world_info()
    if backend is None:
        own_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= info.local_world_size
        backends = "cpu:gloo,cuda:nccl" if own_gpu and dist.is_nccl_available() else "gloo"
    else:
        backends = backend
    with bound_to_loopback():
        dist.init_process_group(
            backends,
            store=meet("process_group", meeting_timeout),
            rank=info.rank,
            world_size=info.world_size,
            timeout=timedelta(seconds=timeout),
        )


def destroy_process_group() -> None:
    """Leave the process group; without one, do nothing."""
    if dist.is_initialized():
        dist.destroy_process_group()


class _SumOverRanks(torch.autograd.Function):
    """Sum of every rank's vector. Each rank's loss may depend on it, so the derivative is the sum
    of every rank's derivative.
    """

    @staticmethod
    def forward(ctx: Any, vector: Tensor) -> Tensor:
        total = vector.detach().clone()
        with _peers():
            dist.all_reduce(total)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, outer: Tensor) -> Tensor:
        total = outer.contiguous().clone()
        with _peers():
            dist.all_reduce(total)
        return total


def all_reduce(tree: T, op: Literal["sum", "mean", "max", "min"] = "sum") -> T:
    """Combine a structure over all ranks, leaf by leaf. All ranks call it.

    Tensors of one type travel as one message. "sum" and "mean" are differentiable: the derivative
    of the sum of all ranks' losses. They count flags, and a mean of whole numbers is a float.

    Args:
        tree: a tensor, a number, or tuples, lists, dicts and named tuples of them, of the same
            structure and shapes on every rank. It is not changed.
        op: how leaves combine. "mean" weighs every rank alike.

    Returns:
        The same structure with the combined leaves, equal on every rank.
    """
    if op not in ("sum", "mean", "max", "min"):
        raise UserError(f'all_reduce knows "sum", "mean", "max" and "min", not {op!r}.')
    size = dist.get_world_size()

    def combine(vector: Tensor) -> Tensor:
        if op in ("sum", "mean"):
            total = _SumOverRanks.apply(vector)
            if op == "sum":
                return total
            return (total if total.is_floating_point() else total.double()) / size
        extreme = vector.detach().clone()
        with _peers():
            dist.all_reduce(extreme, dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.MIN)
        return extreme

    return _in_one_message(tree, combine, same_types=op in ("max", "min"))


def broadcast(tree: T, source: int = 0) -> T:
    """Rank `source`'s values on every rank. All ranks call it, with equal structures and shapes."""

    def from_source(vector: Tensor) -> Tensor:
        copy = vector.detach().clone()
        with _peers():
            dist.broadcast(copy, source)
        return copy

    return _in_one_message(tree, from_source, same_types=True)


def all_gather(tree: T) -> list[T]:
    """Every rank's structure on every rank, in the order of the ranks. All ranks call it.

    Structures must be alike; tensors' first dimensions may differ from rank to rank. The result
    is detached.
    """
    size = dist.get_world_size()
    leaves, structure = optree.tree_flatten(tree)
    gathered: list[list[Any]] = [[] for _ in range(size)]
    for leaf in leaves:
        tensor = _as_tensor(leaf).detach()
        rows = tensor if tensor.dim() else tensor.reshape(1)
        lengths = torch.zeros(size, dtype=torch.int64, device=rows.device)
        lengths[dist.get_rank()] = len(rows)
        with _peers():
            dist.all_reduce(lengths)
        padded = rows.new_zeros(int(lengths.max()), *rows.shape[1:])
        padded[: len(rows)] = rows
        parts = [torch.empty_like(padded) for _ in range(size)]
        if padded.numel():
            with _peers():
                dist.all_gather(parts, padded)
        for rank, part in enumerate(parts):
            part = part[: int(lengths[rank])]
            gathered[rank].append(_like(leaf, part if tensor.dim() else part[0]))
    return [optree.tree_unflatten(structure, rank_leaves) for rank_leaves in gathered]


def barrier() -> None:
    """Wait until every rank has come here. All ranks call it."""
    if "gloo" in dist.get_backend_config():
        dist.all_reduce(torch.zeros(1))  # on the CPU: it needs no GPU to be chosen yet
    else:
        dist.barrier()


def _as_tensor(leaf: Any) -> Tensor:
    """The tensor in which a leaf travels without loss. Flags travel as whole numbers."""
    if not isinstance(leaf, Tensor):
        leaf = torch.tensor(leaf, dtype=torch.float64 if isinstance(leaf, float) else torch.int64)
    return leaf.long() if leaf.dtype is torch.bool else leaf


def _like(leaf: Any, tensor: Tensor) -> Any:
    """What came back, in the type of the leaf that went."""
    return tensor.to(leaf.dtype) if isinstance(leaf, Tensor) else type(leaf)(tensor.item())


def _in_one_message(tree: T, collective: Callable[[Tensor], Tensor], same_types: bool) -> T:
    """Apply a collective of vectors to all leaves, those of one dtype and device together."""
    leaves, structure = optree.tree_flatten(tree)
    groups: dict[tuple, list[int]] = {}
    tensors = [_as_tensor(leaf) for leaf in leaves]
    for place, tensor in enumerate(tensors):
        groups.setdefault((tensor.dtype, tensor.device), []).append(place)
    results: list[Any] = [None] * len(leaves)
    for places in groups.values():
        vector = torch.cat([tensors[place].reshape(-1) for place in places])
        pieces = collective(vector).split([tensors[place].numel() for place in places])
        for place, piece in zip(places, pieces, strict=True):
            whole = piece.reshape(tensors[place].shape)
            if same_types:
                results[place] = _like(leaves[place], whole)
            else:
                results[place] = whole if isinstance(leaves[place], Tensor) else whole.item()
    return optree.tree_unflatten(structure, results)
