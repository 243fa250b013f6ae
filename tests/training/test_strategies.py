"""One task function, any strategy: the same loss and gradient however many workers there are."""

import pytest
import torch
from tiny import build, records, train, without_times
from worlds import run_world

from metadist.tasks import task_keys
from metadist.training.mappers import MetaBatch
from metadist.training.strategies import AllReduceStrategy, LocalStrategy, RpcStrategy

TASKS = 15


def one_step(directory: str, name: str, strategy: str, dtype: str, *overrides: str) -> tuple | None:
    """Loss, buffers' changes and gradient of one meta-batch."""
    options = (f"strategy={strategy}", f"trainer.meta_batch_size={TASKS}", *overrides)
    x = build(directory, *options, name=name)
    x.learner.to(getattr(torch, dtype))
    if dtype == "float64":
        draw = x.tasks.draw
        x.tasks.draw = lambda key: _double(draw(key))
    x.strategy.open()
    outcome = None
    if x.strategy.runs_loop():
        keys = task_keys(0, "train", 1, range(TASKS))
        result = x.strategy.backward(x.train_mapper, x.learner, MetaBatch(keys))
        outcome = (
            result.loss,
            result.buffers,
            [parameter.grad for parameter in x.learner.parameters()],
        )
    x.strategy.close()
    return outcome


def _double(episode):
    return type(episode)(*(part._replace(inputs=part.inputs.double()) for part in episode))


def reference(tmp_path, name: str, dtype: str, *overrides: str) -> tuple:
    """The same by hand: a plain sum over tasks in this process."""
    x = build(tmp_path, "strategy=local", *overrides, name=name)
    x.learner.to(getattr(torch, dtype)).train()
    total = 0.0
    for key in task_keys(0, "train", 1, range(TASKS)):
        episode = x.tasks.draw(key)
        total = total + x.learner(_double(episode) if dtype == "float64" else episode).loss / TASKS
    total.backward()
    return total.detach(), [parameter.grad for parameter in x.learner.parameters()]


MAML = [
    ("local", [], 1),
    *[("rpc", [], size) for size in (1, 2, 3, 4)],
    *[("rpc", ["strategy.gradient=context"], size) for size in (2, 3, 4)],
    *[("rpc", ["+partition=batch"], size) for size in (2, 4)],
    *[("allreduce", [], size) for size in (1, 2, 3, 4)],
    ("allreduce", ["+partition=batch"], 2),
]
SUPERVISED = [
    ("local", [], 1),
    ("rpc", [], 2),
    ("rpc", ["strategy.gradient=context"], 3),
    *[("allreduce", [], size) for size in (1, 2, 3, 4)],
    *[("allreduce", ["+partition=dim0"], size) for size in (2, 4)],
    ("allreduce", ["strategy.engine=sum"], 2),
]
CASES = [("maml", *case) for case in MAML] + [("ddp", *case) for case in SUPERVISED]
TOLERANCE = {"float64": 1e-12, "float32": 1e-5}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(("name", "strategy", "overrides", "size"), CASES)
def test_loss_and_gradient_equal_one_process(tmp_path, name, strategy, overrides, size, dtype):
    torch.set_num_threads(1)
    outcomes = run_world(one_step, size, str(tmp_path), name, strategy, dtype, *overrides)
    loss, gradient = reference(tmp_path, name, dtype)
    drivers = outcomes if strategy == "allreduce" else outcomes[:1]
    scale = max(expected.abs().max() for expected in gradient)
    for found_loss, _, found_gradient in drivers:
        torch.testing.assert_close(found_loss, loss, rtol=TOLERANCE[dtype], atol=0)
        for found, expected in zip(found_gradient, gradient, strict=True):
            assert (found - expected).abs().max() <= TOLERANCE[dtype] * scale


@pytest.mark.parametrize("strategy", ["rpc", "allreduce"])
def test_running_statistics_and_dropout_do_not_depend_on_the_world(tmp_path, strategy):
    option = "model.dropout=0.3"
    alone = run_world(one_step, 1, str(tmp_path), "ddp", "local", "float64", option)[0]
    found = run_world(one_step, 3, str(tmp_path), "ddp", strategy, "float64", option)[0]
    assert len(alone[1]) == 12  # mean, variance and count of four norms
    for name, change in alone[1].items():
        torch.testing.assert_close(found[1][name], change, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(found[0], alone[0], rtol=1e-12, atol=0)


def test_fewer_tasks_than_ranks(tmp_path):
    for strategy in ("rpc", "allreduce"):
        overrides = (f"strategy={strategy}", "trainer.meta_batch_size=2", "trainer.eval_tasks=2")
        directory = tmp_path / strategy
        run_world(train, 3, str(directory), *overrides)
        alone = tmp_path / f"{strategy}-alone"
        run_world(train, 1, str(alone), *overrides)
        assert without_times(records(directory)) == without_times(records(alone))


def test_a_whole_run_is_the_same_bit_for_bit_in_every_world(tmp_path):
    runs = [("local", 1), ("rpc", 1), ("rpc", 2), ("rpc", 3), ("allreduce", 2), ("allreduce", 3)]
    found = {}
    for strategy, size in runs:
        directory = tmp_path / f"{strategy}{size}"
        run_world(train, size, str(directory), f"strategy={strategy}")
        found[strategy, size] = without_times(records(directory))
    assert len(found["local", 1]) == 6
    for other in found.values():
        assert other == found["local", 1]


def test_tensors_may_travel_instead_of_keys(tmp_path):
    for name, value in (("keys", "false"), ("tensors", "true")):
        run_world(train, 2, str(tmp_path / name), f"trainer.send_tasks={value}")
    assert without_times(records(tmp_path / "keys")) == without_times(records(tmp_path / "tensors"))


@pytest.mark.parametrize("first_order", ["true", "false"])
def test_the_sum_reducer_scales_the_gradient(tmp_path, first_order):
    option = f"algorithm.first_order={first_order}"
    mean = run_world(one_step, 2, str(tmp_path), "maml", "rpc", "float64", option)[0]
    total = run_world(one_step, 2, str(tmp_path), "maml", "rpc", "float64", option, "reducer=sum")[
        0
    ]
    torch.testing.assert_close(total[0], mean[0] * TASKS, rtol=1e-12, atol=0)
    for found, expected in zip(total[2], mean[2], strict=True):
        torch.testing.assert_close(found, expected * TASKS, rtol=1e-9, atol=1e-12)


def test_names_and_homes():
    assert [s.name for s in (LocalStrategy, RpcStrategy, AllReduceStrategy)] == [
        "local",
        "rpc",
        "allreduce",
    ]
    assert RpcStrategy.home == "cpu" and AllReduceStrategy.home == "device"
