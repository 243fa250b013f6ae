"""TorchOpt's recipes and metadist's on the same tasks. Imported in a world's ranks only: TorchOpt
reads the world when it is imported.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
import torchopt
import torchopt.distributed as theirs
from torch import Tensor, nn
from torch.distributed import rpc

import metadist as ours

INNER_LR = 0.4


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def make_tasks(number: int) -> tuple[Tensor, Tensor]:
    """Support and query inputs, each of shape (tasks, 6, 4)."""
    both = torch.randn(2, number, 6, 4, generator=torch.Generator().manual_seed(1))
    return both.double().unbind()


def loss_of(model: nn.Module, inputs: Tensor) -> Tensor:
    return (model(inputs) - inputs.sum(-1, keepdim=True).sin()).square().mean()


def solve(model: nn.Module, support: Tensor, query: Tensor) -> Tensor:
    """One task of MAML, with two inner steps of TorchOpt's differentiable optimizer."""
    model = torchopt.module_clone(model, by="reference", detach_buffers=True)
    inner = torchopt.MetaSGD(model, lr=INNER_LR)
    for _ in range(2):
        inner.step(loss_of(model, support))
    return loss_of(model, query)


def solve_by_reference(reference: Any, support: Tensor, query: Tensor) -> Tensor:
    """The same where the model is fetched from its owner, as in TorchOpt's MAML example."""
    return solve(reference.to_here(), support, query)


def batch_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return loss_of(model, batch)


@theirs.auto_init_rpc()
def _in_their_world(function: Callable, *args: Any) -> Any:
    result = function(*args) if theirs.get_rank() == 0 else None
    theirs.barrier()
    rpc.shutdown(graceful=True)
    return result


@ours.auto_init_rpc()
def _in_our_world(function: Callable, *args: Any) -> Any:
    return function(*args) if ours.get_rank() == 0 else None


# --- recipes: loss and gradient ------------------------------------------------------------------


def their_maml(tasks: int, by_reference: bool = False) -> tuple[float, list[Tensor]]:
    model = make_model()
    with theirs.autograd.context() as context:
        clone: Any = torchopt.module_clone(model, by="clone")
        loss = theirs.remote_sync_call(
            solve_by_reference if by_reference else solve,
            args=(rpc.RRef(clone) if by_reference else clone, *make_tasks(tasks)),
            partitioner=theirs.dim_partitioner(0, exclusive=True, keepdim=False),
            reducer=theirs.mean_reducer,
        )
        gradient = theirs.autograd.grad(context, loss, list(model.parameters()))
    return loss.item(), list(gradient)


def our_maml(tasks: int) -> tuple[float, list[Tensor]]:
    model = make_model()
    loss = ours.remote_sync_call(
        solve,
        args=(model, *make_tasks(tasks)),
        partitioner=ours.dim_partitioner(0, exclusive=True, keepdim=False),
        reducer=ours.mean_reducer,
        gradient="worker",
    )
    loss.backward()
    return loss.item(), [parameter.grad for parameter in model.parameters()]


def _data_parallel(names: Any, clone: Callable, items: int) -> tuple[float, list[Tensor]]:
    model = make_model()
    with names.autograd.context() as context:
        loss = names.remote_sync_call(
            batch_loss,
            args=(clone(model, by="clone"), make_tasks(items)[0][:, 0]),
            partitioner=names.batch_partitioner,
            reducer=names.mean_reducer,
        )
        gradient = names.autograd.grad(context, loss, list(model.parameters()))
    return loss.item(), list(gradient)


def their_data_parallel(items: int) -> tuple[float, list[Tensor]]:
    return _data_parallel(theirs, torchopt.module_clone, items)


def our_data_parallel(items: int) -> tuple[float, list[Tensor]]:
    return _data_parallel(ours, ours.module_clone, items)


def _rows(names: Any) -> tuple[list[Tensor], Tensor, Tensor, Any]:
    """Results one by one, their sum, their mean, and one worker's result."""
    items = torch.arange(24.0, dtype=torch.float64).reshape(8, 3)
    each = names.dim_partitioner(0, exclusive=True, keepdim=False)
    sines = names.remote_sync_call(torch.sin, args=(items,), partitioner=each)
    added = names.remote_sync_call(
        torch.sin, args=(items,), partitioner=each, reducer=names.sum_reducer
    )
    mean = names.remote_async_call(
        torch.sin, args=(items,), partitioner=each, reducer=names.mean_reducer
    ).wait()
    one = names.remote_sync_call(torch.add, args=(items, 1), partitioner="worker1")
    return list(sines), added, mean, one


def their_rows() -> tuple[list[Tensor], Tensor, Tensor, Any]:
    return _rows(theirs)


def our_rows() -> tuple[list[Tensor], Tensor, Tensor, Any]:
    return _rows(ours)


RECIPES: dict[str, tuple[Callable, Callable]] = {
    "rows": (their_rows, our_rows),
    "maml": (their_maml, our_maml),
    "data parallelism": (their_data_parallel, our_data_parallel),
}


def run(recipe: str, *args: Any) -> tuple[Any, Any]:
    """What TorchOpt's recipe and metadist's give on rank zero, each in a world of its own."""
    their, our = RECIPES[recipe]
    return _in_their_world(their, *args), _in_our_world(our, *args)


def run_by_reference(tasks: int) -> float:
    """Seconds of TorchOpt's recipe with a remote reference to the model."""
    started = time.monotonic()
    _in_their_world(their_maml, tasks, True)
    return time.monotonic() - started


def run_ours(tasks: int) -> tuple[float, list[Tensor], float]:
    """metadist's loss, gradient and seconds."""
    started = time.monotonic()
    loss, gradient = _in_our_world(our_maml, tasks) or (0.0, [])
    return loss, gradient, time.monotonic() - started
