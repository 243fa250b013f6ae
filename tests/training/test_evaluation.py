"""Means over tasks and their intervals."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny import build, train
from worlds import run_world

from metadist.distributed import Shard
from metadist.loggers import Logger
from metadist.reports import read_test_predictions
from metadist.tasks import task_keys
from metadist.training import Trainer
from metadist.training.evaluation import Estimate, estimate, evaluate
from metadist.training.experiment import make_batch
from metadist.training.results import steps_of, user_metrics
from metadist.training.task_mapper import TASK_INDEX, MetaBatch


def test_mean_and_interval_against_numpy():
    values = torch.rand(600, generator=torch.Generator().manual_seed(0))
    found = estimate(values)
    exact = values.numpy().astype(np.float64)
    assert found.mean == pytest.approx(exact.mean(), rel=1e-12)
    assert found.ci95 == pytest.approx(1.96 * exact.std(ddof=1) / np.sqrt(600), rel=1e-12)
    assert found.tasks == 600


def test_one_task_has_no_interval():
    assert math.isnan(estimate(torch.ones(1)).ci95)


def test_steps_are_listed_in_order_from_zero():
    estimates = {name: Estimate(mean, 0.1, 5) for name, mean in (("mse", 1), ("mse_before", 3))}
    assert steps_of(estimates, "mse") == {}
    estimates |= {f"mse_after_{k}": Estimate(3 - 0.2 * k, 0.2, 5) for k in (2, 1, 10)}
    (rows,) = steps_of(estimates, "mse").values()
    assert [row["steps"] for row in rows] == [0, 1, 2]
    assert rows[0] == {"steps": 0, "mean": 3, "ci95": 0.1}
    assert rows[2] == {"steps": 2, "mean": 2.6, "ci95": 0.2}
    estimates |= {name: Estimate(4, 0.1, 5) for name in ("loss", "own", "own_after_hours")}
    assert user_metrics(estimates) == {"own": 4, "own_after_hours": 4}


def test_a_test_says_what_each_inner_step_brings(tmp_path):
    steps = "algorithm.eval_inner_steps=3"
    two = run_world(train, 2, str(tmp_path / "rpc"), steps, "strategy=rpc")[0]
    rows = two["test_accuracy_by_steps"]
    assert [row["steps"] for row in rows] == [0, 1, 2, 3]
    assert rows[0]["mean"] == two["test_accuracy_before"]
    assert (rows[3]["mean"], rows[3]["ci95"]) == (two["test_accuracy"], two["ci95"])
    # Validation does without, and stopping at a step finds what was found on the way.
    x = build(tmp_path / "again", "strategy=local", "algorithm.eval_inner_steps=2")
    x.learner.load_state_dict(
        torch.load(tmp_path / "rpc/checkpoints/iteration-00000004.pt")["learner"]
    )
    keys = task_keys(0, "test", 0, range(7))
    estimates = evaluate(
        x.strategy, x.evaluate_mapper, x.learner, keys, lambda some: make_batch(x, some)
    ).estimates
    assert set(estimates) == {"loss", "accuracy", "accuracy_before"}
    assert estimates["accuracy"].mean == pytest.approx(rows[2]["mean"], abs=1e-12)


class Recording:
    """A strategy that records the number of tasks of each call."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def map_tasks(self, mapper, learner, batch) -> dict[str, torch.Tensor]:
        self.sizes.append(batch.size)
        indices = batch.keys[:, 3].flip(0)  # shards in another order than the tasks
        return {"loss": indices.double(), TASK_INDEX: indices}


@pytest.mark.parametrize(("workers", "sizes"), [(1, [64] * 9 + [24]), (8, [64] * 9 + [24])])
def test_few_workers_evaluate_64_tasks_at_a_time(monkeypatch, workers, sizes):
    assert evaluated_in(monkeypatch, workers, 600) == sizes


def test_every_worker_has_tasks_of_a_chunk(monkeypatch):
    assert evaluated_in(monkeypatch, 32, 600) == [256, 256, 88]
    assert evaluated_in(monkeypatch, 1024, 2000) == [2000]


def evaluated_in(monkeypatch, workers: int, tasks: int) -> list[int]:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(workers))
    strategy, keys = Recording(), task_keys(0, "test", 0, range(tasks))
    found = evaluate(strategy, None, None, keys, MetaBatch)
    assert torch.equal(found.metrics["loss"], keys[:, 3].double())
    return strategy.sizes


def test_no_inner_steps_no_list(tmp_path):
    results = train(str(tmp_path), "strategy=local", "algorithm=prototypical")
    assert not [name for name in results if name.endswith("_by_steps")]


def test_the_first_task_without_a_finite_loss_is_reported(tmp_path, monkeypatch, caplog):
    x = build(tmp_path, "strategy=local", "trainer.validation_tasks=70")
    losses = torch.zeros(70)
    losses[66], losses[68] = math.inf, math.nan

    def values(mapper, learner, batch) -> dict[str, torch.Tensor]:
        indices = batch.keys[:, 3]
        return {"loss": losses[indices], "accuracy": losses[indices], TASK_INDEX: indices}

    monkeypatch.setattr(x.strategy, "map_tasks", values)
    x.logger = Logger()
    Trainer(x).validate()
    key = "0,validation,0,66"
    assert caplog.messages == [f"iteration 0: the validation task with key {key} has loss inf"]


def test_evaluation_pauses_after_each_chunk():
    losses = torch.arange(70.0)
    chunks = iter(losses.split(64))
    strategy = SimpleNamespace(
        map_tasks=lambda _, __, keys: {"loss": next(chunks), TASK_INDEX: keys[:, 3]}
    )
    keys, pauses = task_keys(0, "test", 0, range(70)), []
    found = evaluate(strategy, None, None, keys, lambda keys: keys, lambda: pauses.append(1))
    assert len(pauses) == 2
    assert torch.equal(found.metrics["loss"], losses) and found.predictions == []


def strided(learner, batch: MetaBatch) -> list[Shard]:
    parts = [batch.select(slice(start, None, 3)) for start in range(3)]
    return [Shard(0, (learner, part), size=part.size) for part in parts]


def test_shards_in_another_order_than_the_tasks(tmp_path):
    own = (f"+partition._target_={__name__}.strided", "+partition._partial_=true")
    plain = train(str(tmp_path / "plain"), "strategy=local")
    results = train(str(tmp_path / "own"), "strategy=local", *own)
    assert results["test_loss"] == plain["test_loss"]
    predictions = [read_test_predictions(tmp_path / name) for name in ("plain", "own")]
    assert predictions[0] == predictions[1]
