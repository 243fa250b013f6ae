"""Programs written as TorchOpt's distributed examples are, with `import metadist as todist`.

The model is a remote reference that every task fetches; gradients come from a distributed autograd
context, and the optimizer reads `.grad`. The losses are those of one process with torch alone.
"""

import importlib.util
import threading

import pytest
import torch
from torch import Tensor, nn
from worlds import run_world

import metadist as todist

TASKS, STEPS, INNER_LR = 8, 2, 0.1

_lock = threading.Lock()
_worker: dict = {"device": None, "name": "", "tasks": None}


def init_worker() -> None:
    """Called on every rank after RPC is initialized."""
    info = todist.get_world_info()
    assert todist.get_local_rank() == info.local_rank and info.world_rank == todist.get_rank()
    _worker["name"] = info.worker_name
    torch.manual_seed(info.world_rank)


def make_model() -> nn.Module:
    torch.manual_seed(3)
    layers = (nn.Linear(4, 6), nn.BatchNorm1d(6, momentum=1.0), nn.Tanh(), nn.Linear(6, 3))
    return nn.Sequential(*layers).double()


def make_batch(step: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Support and query sets of all tasks."""
    generator = torch.Generator().manual_seed(step)
    support = torch.randn(TASKS, 6, 4, generator=generator).double()
    query = torch.randn(TASKS, 9, 4, generator=generator).double()
    classes = torch.arange(9) % 3
    return support, classes[:6].expand(TASKS, -1), query, classes.expand(TASKS, -1)


def adapt(model: nn.Module, use_torchopt: bool, x: Tensor, y: Tensor, query: Tensor) -> Tensor:
    """Logits of the queries after inner steps; `model` stays as it is."""
    if use_torchopt:
        import torchopt

        net = torchopt.module_clone(model, by="reference", detach_buffers=True, device=None)
        inner = torchopt.MetaSGD(net, lr=INNER_LR)
        for _ in range(STEPS):
            inner.step(nn.functional.cross_entropy(net(x), y))
        return net(query)
    net = todist.module_clone(model, by="reference", detach_buffers=True)
    # A clone's parameters may be plain tensors, which named_parameters does not list.
    state = {
        f"{prefix}.{name}": getattr(module, name)
        for prefix, module in net.named_modules()
        for name in ("weight", "bias")
        if isinstance(getattr(module, name, None), Tensor)
    }
    for _ in range(STEPS):
        loss = nn.functional.cross_entropy(torch.func.functional_call(net, state, (x,)), y)
        gradients = torch.autograd.grad(loss, list(state.values()), create_graph=True)
        pairs = zip(state.items(), gradients, strict=True)
        state = {name: value - INNER_LR * gradient for (name, value), gradient in pairs}
    return torch.func.functional_call(net, state, (query,))


def reduce_pairs(results: list[tuple[Tensor, float]]) -> tuple[Tensor, float]:
    """Means of the tasks' losses and accuracies."""
    losses, accuracies = zip(*results, strict=True)
    return torch.stack(losses).mean(), sum(accuracies) / len(accuracies)


def outer_loss(
    model: nn.Module, use_torchopt: bool, x: Tensor, y: Tensor, query_x: Tensor, query_y: Tensor
) -> tuple[Tensor, float]:
    logits = adapt(model, use_torchopt, x, y, query_x)
    accuracy = (logits.argmax(1) == query_y).double().mean().item()
    return nn.functional.cross_entropy(logits, query_y), accuracy


# --- the batch is on rank zero, and a partitioner of metadist splits it ---------------------------


@todist.parallelize(
    partitioner=todist.dim_partitioner(dim=0, exclusive=True, keepdim=False), reducer=reduce_pairs
)
def sent_tasks(net_rref, x, y, query_x, query_y, use_torchopt):
    assert _worker["name"] == f"worker{todist.get_rank()}"
    return outer_loss(net_rref.to_here(), use_torchopt, x, y, query_x, query_y)


# --- every worker has the data, and a partitioner of the program's own says which task -----------


def one_task_each(net_rref, use_torchopt, task, step):
    assert task is None
    size = todist.get_world_size()
    return [(index % size, (net_rref, use_torchopt, index, step), None) for index in range(TASKS)]


@todist.parallelize(partitioner=one_task_each, reducer=reduce_pairs)
def local_tasks(net_rref, use_torchopt, task, step):
    with _lock:  # several tasks may run at a time
        _worker["tasks"] = _worker["tasks"] or {}
        batch = _worker["tasks"].setdefault(step, make_batch(step))
    return outer_loss(net_rref.to_here(), use_torchopt, *(part[task] for part in batch))


@todist.rank_zero_only
def train(program: str, use_torchopt: bool) -> list[float]:
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    seen = []
    for step in range(3):
        optimizer.zero_grad()
        net_rref = todist.rpc.RRef(clone_of(model, use_torchopt))
        with todist.autograd.context() as context:
            if program == "sent":
                loss, accuracy = sent_tasks(net_rref, *make_batch(step), use_torchopt)
            else:
                loss, accuracy = local_tasks(net_rref, use_torchopt, None, step)
            todist.autograd.backward(context, loss)
            optimizer.step()
        seen += [loss.item(), accuracy]
    # Without a context, as in a test: no gradient is wanted.
    loss, _ = sent_tasks(todist.rpc.RRef(model), *make_batch(9), use_torchopt)
    return [*seen, loss.item()]


def clone_of(model: nn.Module, use_torchopt: bool) -> nn.Module:
    """A clone with plain tensors in place of parameters: these keep their graph."""
    if use_torchopt:
        import torchopt

        return torchopt.module_clone(model, by="copy")
    return todist.module_clone(model, by="copy")


@todist.auto_init_rpc(init_worker)
def main(program: str, use_torchopt: bool) -> list[float] | None:
    todist.barrier()
    return train(program, use_torchopt)


def in_one_process() -> list[float]:
    """The same training with torch alone."""
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)

    def mean(step: int) -> tuple[Tensor, float]:
        results = []
        for x, y, query, classes in zip(*make_batch(step), strict=True):
            state = dict(model.named_parameters())
            for _ in range(STEPS):
                logits = torch.func.functional_call(model, state, (x,))
                gradients = torch.autograd.grad(
                    nn.functional.cross_entropy(logits, y), list(state.values()), create_graph=True
                )
                pairs = zip(state.items(), gradients, strict=True)
                state = {name: value - INNER_LR * gradient for (name, value), gradient in pairs}
            logits = torch.func.functional_call(model, state, (query,))
            right = (logits.argmax(1) == classes).double().mean().item()
            results.append((nn.functional.cross_entropy(logits, classes), right))
        return reduce_pairs(results)

    seen = []
    for step in range(3):
        optimizer.zero_grad()
        loss, accuracy = mean(step)
        loss.backward()
        optimizer.step()
        seen += [loss.item(), accuracy]
    return [*seen, mean(9)[0].item()]


@pytest.mark.parametrize("program", ["sent", "local"])
def test_programs_in_the_way_of_torchopts_examples(program):
    zero, one = run_world(main, 2, program, False)
    assert zero == pytest.approx(in_one_process(), rel=1e-9) and one is None


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("torchopt") is None,
    reason="torchopt is not installed: pip install -e '.[baselines]'",
)
@pytest.mark.parametrize("program", ["sent", "local"])
def test_programs_with_torchopts_inner_optimizer(program):
    zero, one = run_world(main, 2, program, True)
    assert zero == pytest.approx(in_one_process(), rel=1e-9) and one is None
