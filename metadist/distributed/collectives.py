"""Collectives on nested structures of tensors and numbers, over shared memory, Gloo or NCCL."""

import hashlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal, TypeVar, cast

import numpy as np
import optree
import torch
import torch.distributed as dist
from torch import Tensor

from metadist.distributed.errors import connection_errors_as_worker_lost
from metadist.distributed.hierarchy import FLAT_UP_TO, Hierarchy, plan_levels
from metadist.distributed.interfaces import bound_to_interface, default_environment
from metadist.distributed.rendezvous import all_gather_object, rendezvous
from metadist.distributed.shared_memory import SharedMemorySum, open_shared_memory
from metadist.distributed.store import RENDEZVOUS_TIMEOUT, node_name
from metadist.distributed.world import get_world_info
from metadist.errors import UserError

T = TypeVar("T")

COLLECTIVE_TIMEOUT = 300.0
"""The default number of seconds that a collective waits for the slowest rank."""

_hierarchy: Hierarchy | None = None
_shared_memory: SharedMemorySum | None = None


def init_process_group(
    backend: str | None = None,
    *,
    timeout: float = COLLECTIVE_TIMEOUT,
    rendezvous_timeout: float = RENDEZVOUS_TIMEOUT,
    flat_up_to: int = FLAT_UP_TO,
    shared_memory: bool = True,
    device: torch.device | None = None,
) -> None:
    """Open the default process group. Every rank calls it.

    Args:
        backend: the backend of `torch.distributed.init_process_group`, such as "gloo", "nccl" or
            "cpu:gloo,cuda:nccl". Default: NCCL for GPU tensors and Gloo for CPU tensors if the
            devices of all ranks are different GPUs, else Gloo.
        timeout: seconds that a collective waits for the slowest rank.
        rendezvous_timeout: seconds to wait for all ranks to arrive.
        flat_up_to: the number of ranks up to which `all_reduce` over Gloo is one collective; more
            ranks reduce in groups (`metadist.distributed.hierarchy`).
        shared_memory: whether the ranks of a single machine sum CPU tensors in shared memory, where
            that is possible (`metadist.distributed.shared_memory`), instead of over Gloo.
        device: the device of this rank's tensors. Default: the GPU of the local rank if there is
            one, else the CPU.

    Raises:
        UserError: `flat_up_to` is below 1; the ranks chose different backends, for instance
            because a GPU of one node does not work, which all ranks raise; or a rank without a GPU
            was given NCCL.
        RendezvousTimeoutError: some ranks did not arrive.
    """
    if flat_up_to < 1:
        raise UserError(f"flat_up_to must be at least 1, got {flat_up_to}.")
    info = get_world_info()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device is None or device == torch.device("cuda"):
        device = torch.device("cuda", info.local_rank % gpus) if gpus else torch.device("cpu")
    store = rendezvous("process_group", rendezvous_timeout)
    backends, nodes = _agree_on_backend(store, backend, device, rendezvous_timeout)
    uses_nccl = "nccl" in backends
    if uses_nccl:
        if device.type != "cuda":
            raise UserError("backend=nccl needs a GPU, and this rank has none: choose gloo.")
        torch.cuda.set_device(device)
    global _hierarchy, _shared_memory
    levels = plan_levels(nodes, flat_up_to) if "gloo" in backends else []
    # Two ranks connect when they first exchange a message; otherwise each connects to all others.
    on_demand = {"TORCH_GLOO_LAZY_INIT": "1"} if levels else {}
    with bound_to_interface(), default_environment(on_demand):
        dist.init_process_group(
            backends,
            # So that NCCL connects now, while its interface is set.
            device_id=device if uses_nccl else None,
            store=store,
            rank=info.rank,
            world_size=info.world_size,
            timeout=timedelta(seconds=timeout),
        )
        _hierarchy = Hierarchy(levels, timeout) if levels else None
    if shared_memory and info.world_size > 1 and len(set(nodes)) == 1:
        _shared_memory = open_shared_memory(store, timeout, rendezvous_timeout)


def _agree_on_backend(
    store: dist.Store, backend: str | None, device: torch.device, timeout: float
) -> tuple[str, list[str]]:
    """The backend of all ranks, and the name of each rank's node.

    Raises:
        UserError: the ranks chose different backends.
    """
    info = get_world_info()
    backends = "gloo" if backend is None else backend
    has_gpu = device.type == "cuda" and torch.cuda.device_count() >= info.local_world_size
    if backend is None and has_gpu and dist.is_nccl_available():
        backends = "cpu:gloo,cuda:nccl"
    node_device = f"{info.rank - info.local_rank}:{device}"  # the node by its first rank
    message = [backends, node_name(), node_device]
    messages = all_gather_object(store, "backend", message, timeout)
    ranks_by_backend: dict[str, list[int]] = {}
    for rank, (name, *_) in enumerate(messages):
        ranks_by_backend.setdefault(name, []).append(rank)
    if len(ranks_by_backend) > 1:
        raise UserError(
            "the ranks chose different backends of torch.distributed ("
            + ", ".join(f"{name} on ranks {ranks}" for name, ranks in ranks_by_backend.items())
            + "): check the GPU driver of the nodes without NCCL, or start fewer ranks per node."
        )
    if backend is None and len({each for *_, each in messages}) < info.world_size:
        backends = "gloo"  # NCCL refuses ranks that share a GPU
    return backends, [node for _, node, _ in messages]


def destroy_process_group(graceful: bool = True) -> None:
    """Leave the process group, if there is one.

    Args:
        graceful: whether to wait for collectives that this rank has started. If False, abort them,
            as after an error: NCCL would wait for ranks that may be gone.
    """
    global _hierarchy, _shared_memory
    _hierarchy = None
    if _shared_memory is not None:
        _shared_memory.close()
        _shared_memory = None
    group = dist.group.WORLD
    if group is None:
        return
    if not graceful:
        group.abort()
    dist.destroy_process_group()


def _reduce_in_place(vector: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
    if op == dist.ReduceOp.SUM and _shared_memory is not None and _shared_memory.supports(vector):
        _shared_memory.all_reduce(vector)
        return
    with connection_errors_as_worker_lost():
        if _hierarchy is not None and vector.is_cpu:
            _hierarchy.all_reduce(vector, op)
        else:
            dist.all_reduce(vector, op)


class _SumOverRanks(torch.autograd.Function):
    """The sum of all ranks' vectors. The loss of each rank may depend on it, so the gradient is the
    sum of all ranks' gradients.
    """

    @staticmethod
    def forward(ctx: Any, vector: Tensor) -> Tensor:
        total = vector.detach().clone()
        _reduce_in_place(total)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        total = grad_output.contiguous().clone()
        _reduce_in_place(total)
        return total


def all_reduce(
    tree: T, op: Literal["sum", "mean", "max", "min"] = "sum", *, check: bool = True
) -> T:
    """Reduce a structure over all ranks, leaf by leaf. All ranks call it.

    Tensors of one dtype are reduced in one collective. "sum" and "mean" are differentiable, with
    the gradient of the sum of all ranks' losses: results require grad if a tensor of their dtype
    does on this rank. They count booleans and sum integers in int64; the mean of integers is a
    float. "max" and "min" return NaN where a value is NaN.

    Args:
        tree: a tensor, a NumPy array, a number, or tuples, lists, dicts and named tuples of them,
            with the same structure, shapes and types on every rank. It is not changed.
        op: the reduction. "mean" gives every rank the same weight.
        check: whether to compare the ranks' calls first, in a collective of its own.

    Returns:
        The same structure with the reduced leaves, equal on every rank.

    Raises:
        UserError: there is no such reduction, or the ranks' collectives, reductions, structures,
            shapes or types differ.
        WorkerLostError: another rank has died or left.
    """
    if op not in ("sum", "mean", "max", "min"):
        raise UserError(f'op must be "sum", "mean", "max" or "min", got {op!r}.')
    if check:
        _require_equal_calls("all_reduce", op, tree)
    size = dist.get_world_size()

    def combine(vector: Tensor) -> Tensor:
        if op in ("sum", "mean"):
            inexact = vector.is_floating_point() or vector.is_complex()
            if vector.requires_grad:
                total = _SumOverRanks.apply(vector)
            else:  # a new vector, which may be overwritten
                total = vector if inexact else vector.long()
                _reduce_in_place(total)
            if op == "sum":
                return total
            return (total if inexact else total.double()) / size
        extreme = vector.detach().clone()
        if extreme.dtype is torch.int16:  # Gloo has no maximum of this type
            extreme = extreme.int()
        _reduce_in_place(extreme, dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.MIN)
        if vector.is_floating_point():  # the backend's comparison may lose a NaN
            nan = vector.detach().isnan().to(torch.int32)
            _reduce_in_place(nan, dist.ReduceOp.MAX)
            extreme.masked_fill_(nan.bool(), torch.nan)
        return extreme

    return _per_dtype(tree, combine, keep_types=op in ("max", "min"))


def broadcast(tree: T, source: int = 0) -> T:
    """Return rank `source`'s values on every rank; `tree` is not changed. All ranks call it, with
    the same structure, shapes and types.

    Raises:
        UserError: there is no such rank, or the ranks' collectives, sources, structures, shapes or
            types differ.
        WorkerLostError: another rank has died or left.
    """
    if not 0 <= source < (size := dist.get_world_size()):
        raise UserError(f"there is no rank {source}: with {size} ranks choose 0 to {size - 1}.")
    _require_equal_calls("broadcast", source, tree)

    def from_source(vector: Tensor) -> Tensor:
        copy = vector.detach().clone()
        with connection_errors_as_worker_lost():
            dist.broadcast(copy.view(torch.uint8), source)  # as bytes, for any dtype
        return copy

    return _per_dtype(tree, from_source, keep_types=True)


def all_gather(tree: T) -> list[T]:
    """Gather every rank's structure on all ranks, in the order of the ranks. All ranks call it.

    The structures and types must be equal, but the tensors' first dimensions may differ. The result
    is detached.

    Raises:
        UserError: the ranks' collectives, structures, other dimensions or types differ.
        WorkerLostError: another rank has died or left.
    """
    _require_equal_calls("all_gather", None, tree, any_length=True)
    size = dist.get_world_size()
    leaves, structure = optree.tree_flatten(cast(Any, tree))
    gathered: list[list[Any]] = [[] for _ in range(size)]
    for leaf in leaves:
        tensor = _as_tensor(leaf).detach()
        rows = tensor if tensor.dim() else tensor.reshape(1)
        lengths = torch.zeros(size, dtype=torch.int64, device=rows.device)
        lengths[dist.get_rank()] = len(rows)
        _reduce_in_place(lengths)
        padded = rows.new_zeros(int(lengths.max()), *rows.shape[1:])
        padded[: len(rows)] = rows
        parts = [torch.empty_like(padded) for _ in range(size)]
        if padded.numel():
            with connection_errors_as_worker_lost():
                dist.all_gather([_bytes(part) for part in parts], _bytes(padded))
        for rank, part in enumerate(parts):
            part = part[: int(lengths[rank])]
            part = part if tensor.dim() else part[0]
            gathered[rank].append(_like(leaf, part, keep_type=True))
    trees: Any = [optree.tree_unflatten(structure, rank_leaves) for rank_leaves in gathered]
    return trees


def barrier() -> None:
    """Wait until every rank has called it.

    Raises:
        WorkerLostError: another rank has died or left.
    """
    if "gloo" in dist.get_backend_config():
        _reduce_in_place(torch.zeros(1))  # on the CPU, because no GPU may be set yet
    else:
        with connection_errors_as_worker_lost():
            dist.barrier()


def _require_equal_calls(name: str, option: Any, tree: Any, any_length: bool = False) -> None:
    """Require that the ranks call the same collective with the same structure, shapes and types.

    Vectors of other types would be added as bytes, and different collectives wait for each other.

    Args:
        name: the collective.
        option: its reduction or source.
        tree: this rank's values.
        any_length: whether the first dimensions may differ.
    """
    leaves, structure = optree.tree_flatten(tree)
    tensors = [_as_tensor(leaf) for leaf in leaves]
    kinds = [(str(t.dtype), tuple(t.shape[any_length:]), t.dim()) for t in tensors]
    digest = hashlib.sha256(repr((name, option, str(structure), kinds)).encode()).digest()
    numbers = [int.from_bytes(digest[i : i + 2], "big") for i in range(0, 8, 2)]
    device = "cpu" if "gloo" in dist.get_backend_config() else "cuda"
    sums = torch.tensor([*numbers, *(n * n for n in numbers)], device=device, dtype=torch.float64)
    _reduce_in_place(sums)
    # Equal numbers, and no others, have the variance zero. The sums are exact.
    totals, squares = sums.view(2, -1)
    if not torch.equal(squares * dist.get_world_size(), totals.square()):
        raise UserError(
            "the ranks called different collectives, or one with another op or source, or with "
            "values of different structures, shapes or types: do the same on every rank; the "
            "numbers 0 and 0.0 have different types."
        )


def _bytes(tensor: Tensor) -> Tensor:
    """A tensor's memory as bytes, so that the backends need not support its dtype."""
    return tensor.view(-1).view(torch.uint8)


def _as_tensor(leaf: Any) -> Tensor:
    """Convert a leaf to a tensor, without loss. Booleans become integers."""
    if isinstance(leaf, np.ndarray | np.generic):
        leaf = torch.from_numpy(np.array(leaf))
    if not isinstance(leaf, Tensor):
        leaf = torch.tensor(leaf, dtype=torch.float64 if isinstance(leaf, float) else torch.int64)
    return leaf.long() if leaf.dtype is torch.bool else leaf


def _like(leaf: Any, tensor: Tensor, keep_type: bool) -> Any:
    """Convert a result to a tensor, a NumPy array or a number, like the leaf it was computed from.

    Args:
        leaf: the leaf.
        tensor: the result.
        keep_type: whether to convert it to the leaf's dtype or type of number too.
    """
    if isinstance(leaf, np.ndarray | np.generic):
        array = tensor.detach().numpy()
        return (array.astype(leaf.dtype) if keep_type else array)[()]
    if isinstance(leaf, Tensor):
        return tensor.to(leaf.dtype) if keep_type else tensor
    return type(leaf)(tensor.item()) if keep_type else tensor.item()


def _per_dtype(tree: Any, collective: Callable[[Tensor], Tensor], keep_types: bool) -> Any:
    """Apply a collective of vectors to all leaves, one vector per dtype and device."""
    leaves, structure = optree.tree_flatten(tree)
    groups: dict[tuple, list[int]] = {}
    tensors = [_as_tensor(leaf) for leaf in leaves]
    for index, tensor in enumerate(tensors):
        groups.setdefault((tensor.dtype, tensor.device), []).append(index)
    results: list[Any] = [None] * len(leaves)
    for indices in groups.values():
        vector = torch.cat([tensors[index].reshape(-1) for index in indices])
        pieces = collective(vector).split([tensors[index].numel() for index in indices])
        for index, piece in zip(indices, pieces, strict=True):
            result = piece.reshape(tensors[index].shape)
            results[index] = _like(leaves[index], result, keep_types)
    return optree.tree_unflatten(structure, results)
