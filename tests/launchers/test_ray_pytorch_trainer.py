"""PyTorchTrainer: equality with one process, state between calls, lost replicas, Tune."""

import ast
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("ray")

import linear_example as example
from ray_workers import is_alive, signal_a_worker_once, worker_processes

from metadist.errors import UserError
from metadist.launchers.ray.cluster import max_concurrent_trials
from metadist.launchers.ray.pytorch_trainer import PyTorchTrainable, PyTorchTrainer
from metadist.tasks import seed_from

# `make test-slow` installs Ray.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray")]

ITEMS, BATCH, EPOCHS = 11, 4, 3  # the last batch of an epoch has 3 items: shards of 2 and 1


class Points(torch.utils.data.Dataset):
    """Points of three classes."""

    def __init__(self, items: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(items, 5, generator=generator)
        self.y = torch.randint(0, 3, (items,), generator=generator)

    def __getitem__(self, index):
        return self.x[index], self.y[index]

    def __len__(self):
        return len(self.x)


def net(config):
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


def points(config):
    return Points(ITEMS, 0), Points(7, 1)


def momentum(model, config):
    return torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)


class SlowPoints(Points):
    """Points that take their time, so that a worker can be killed while it reads them."""

    def __getitem__(self, index):
        time.sleep(0.05)
        return super().__getitem__(index)


def slow_points(config):
    return SlowPoints(ITEMS, 0), Points(7, 1)


def trainer(**options) -> PyTorchTrainer:
    options = {"num_replicas": 2, "batch_size": BATCH, "loss": nn.CrossEntropyLoss} | options
    data = options.pop("data", points)
    return PyTorchTrainer(net, data, momentum, {"lr": 0.1}, **options)


def in_one_process() -> tuple[list[float], nn.Module, tuple[float, float]]:
    """The same training as a plain loop: losses of the epochs, model, validation metrics."""
    torch.manual_seed(0)
    model, (training, validation) = net({}), points({})
    optimizer, loss = momentum(model, {"lr": 0.1}), nn.CrossEntropyLoss()
    losses = []
    for epoch in range(EPOCHS):
        order = torch.randperm(ITEMS, generator=torch.Generator().manual_seed(seed_from(0, epoch)))
        total = 0.0
        for batch in order.split(BATCH):
            value = loss(model(training.x[batch]), training.y[batch])
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            total += value.item() * len(batch)
        losses.append(total / ITEMS)
    with torch.no_grad():
        outputs = model(validation.x)
        right = (outputs.argmax(1) == validation.y).float().mean().item()
        return losses, model, (loss(outputs, validation.y).item(), right)


def equal_models(one: nn.Module, other: nn.Module) -> None:
    for mine, its in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-6)


def in_time(work: Callable[[], Any], seconds: float = 90.0) -> Any:
    """The result of a call, or its exception; a timeout if it hangs."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future.result(seconds)


def test_two_replicas_train_as_one_process_and_keep_their_state(tmp_path):
    losses, model, (loss, accuracy) = in_one_process()
    with trainer() as two:
        stats = [two.train() for _ in range(EPOCHS - 1)]
        path = two.save(tmp_path / "after two.pt")
        stats.append(two.train())
        equal_models(two.get_model(), model)
        metrics = two.validate()
        # From the saved state on it goes the same way once more, the optimizer's state included.
        two.restore(path)
        again = two.train()
        equal_models(two.get_model(), model)
        with pytest.raises(UserError, match="cannot be read"):
            two.restore(tmp_path / "nothing.pt")
    assert [each["train_loss"] for each in stats] == pytest.approx(losses, rel=1e-5)
    assert [each["epoch"] for each in stats] == [1, 2, 3] and again["epoch"] == 3
    assert again["train_loss"] == stats[-1]["train_loss"]
    assert (stats[0]["items"], stats[0]["batches"]) == (ITEMS, 3)
    assert metrics["validation_loss"] == pytest.approx(loss, rel=1e-5)
    assert metrics["validation_accuracy"] == pytest.approx(accuracy)
    with pytest.raises(UserError, match="has been shut down"):
        two.train()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"num_replicas": 0}, "num_replicas=0"),
        ({"batch_size": 2.5}, "batch_size=2.5"),
        ({"seed": -1}, "seed=-1 does not fit: it must be a whole number from 0"),
        ({"backend": "mpi"}, "backend='mpi'"),
        ({"num_replicas": 99}, "num_replicas=99 asks for 99 workers with a CPU each"),
        ({"use_gpu": True, "num_replicas": 2}, "GPU"),
    ],
)
def test_invalid_options_are_refused_at_once(options, sentence):
    with pytest.raises(UserError, match=sentence):
        trainer(**options)


def fails_on_one(config):
    from metadist.distributed import get_rank

    if get_rank() == 1:
        raise LookupError("a mistake on purpose")
    return points(config)


def test_an_error_of_a_creator_is_raised_and_not_retried():
    with pytest.raises(RuntimeError, match="LookupError: a mistake on purpose"):
        trainer(data=fails_on_one)
    with pytest.raises(UserError, match="data_creator must return"):
        trainer(data=lambda config: iter([]))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_a_lost_replica_changes_nothing(number):
    losses, model, _ = in_one_process()
    with trainer(data=slow_points, timeout_seconds=5) as two:
        stats = [two.train()]
        signalled = signal_a_worker_once(lambda: True, "Replica", number)
        stats += in_time(lambda: [two.train() for _ in range(EPOCHS - 1)])
        equal_models(two.get_model(), model)
    assert signalled and not is_alive(signalled[0])
    assert [each["train_loss"] for each in stats] == pytest.approx(losses, rel=1e-5)


def test_too_many_lost_replicas_end_the_trainer():
    with trainer(data=slow_points, max_failures=0) as two:
        signal_a_worker_once(lambda: True, "Replica")
        with pytest.raises(RuntimeError, match="the replicas were lost"):
            in_time(lambda: [two.train() for _ in range(EPOCHS)])


@pytest.mark.parametrize(
    "message",
    ["gloo: unsupported tensor type", "gloo: connection reset by peer"],  # while all replicas live
)
def test_a_program_error_in_a_collective_is_not_retried(message):
    def loss(outputs, targets):
        raise RuntimeError(message)

    with (
        trainer(loss=loss) as two,
        pytest.raises(RuntimeError, match=rf"a replica failed:[\s\S]*{message}"),
    ):
        in_time(two.train)


def test_after_an_interrupted_call_each_call_has_its_own_answer():
    def interrupted_train() -> None:
        timer = threading.Timer(0.3, signal.raise_signal, [signal.SIGINT])
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            two.train()

    losses, model, (loss, _) = in_one_process()
    with trainer(data=slow_points) as two:
        interrupted_train()
        interrupted_train()
        stats = in_time(two.train)
        metrics = in_time(two.validate)
        equal_models(two.get_model(), model)
        interrupted_train()
        replicas = worker_processes(os.getpid(), "Replica")
    assert stats["epoch"] == 3 and stats["train_loss"] == pytest.approx(losses[2], rel=1e-5)
    assert metrics["validation_loss"] == pytest.approx(loss, rel=1e-5)
    deadline = time.monotonic() + 10
    while any(map(is_alive, replicas)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(replicas) == 2 and not any(map(is_alive, replicas))


def test_the_documents_example_runs():
    ended = subprocess.run(
        [sys.executable, example.__file__], capture_output=True, text=True, timeout=180
    )
    assert ended.returncode == 0 and "success!" in ended.stdout, ended.stderr
    stats = ast.literal_eval(ended.stdout.splitlines()[0])
    assert stats["train_loss"] == pytest.approx(in_one_process_linear(), rel=1e-5)


def in_one_process_linear() -> float:
    torch.manual_seed(0)
    model, (training, _) = example.model_creator({}), example.data_creator({})
    loss, optimizer = example.optimizer_creator(model, {})
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(seed_from(0, 0)))
    total = 0.0
    for batch in order.split(512):
        value = loss(model(training.x[batch, None]), training.y[batch, None])
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        total += value.item() * len(batch)
    return total / 1000


@pytest.mark.parametrize("scheduler", ["grid", "asha"])
def test_tune_finds_the_better_rate_over_distributed_trainings(tmp_path, scheduler):
    from ray import cloudpickle, tune
    from ray.tune.schedulers import ASHAScheduler

    cloudpickle.register_pickle_by_value(example)  # as what a script itself defines is
    asha = ASHAScheduler(max_t=4, grace_period=1, reduction_factor=2)
    analysis = tune.run(
        PyTorchTrainable,
        config={
            "model_creator": example.model_creator,
            "data_creator": example.data_creator,
            "optimizer_creator": example.optimizer_creator,
            "num_replicas": 2,
            "use_gpu": False,
            "batch_size": 512,
            "backend": "gloo",
            "config": {"lr": tune.grid_search([1e-2, 1e-6])},
        },
        metric="validation_loss",
        mode="min",
        stop={"training_iteration": 4},
        scheduler=asha if scheduler == "asha" else None,
        max_concurrent_trials=max_concurrent_trials(2),
        storage_path=str(tmp_path),
        verbose=0,
    )
    assert analysis.best_config["config"]["lr"] == 1e-2
    epochs = [trial.last_result["epoch"] for trial in analysis.trials]
    assert epochs == ([4, 4] if scheduler == "grid" else [4, 1])
