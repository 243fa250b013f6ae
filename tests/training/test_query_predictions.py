"""Predictions of the test tasks: `test_predictions.jsonl`, equal for every strategy and world."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import SMALL, build, compose, train_world
from worlds import run_world

from metadist.algorithms import TaskResult
from metadist.config import build_experiment
from metadist.reports import TEST_PREDICTIONS_FILE, read_test_predictions
from metadist.tasks import Episode, Examples, task_keys
from metadist.training import Trainer
from metadist.training.evaluation import evaluate
from metadist.training.experiment import make_batch
from metadist.training.query_predictions import QUERIES, query_values, split_queries

WORLDS = [("allreduce", 2), ("rpc", 3)]


def text(directory: Path) -> str:
    return (directory / TEST_PREDICTIONS_FILE).read_text(encoding="utf-8")


def test_predictions_are_those_of_the_learner_in_every_world(tmp_path):
    options = ("trainer.eval_seed=9", "trainer.iterations=1", "trainer.eval_every=0")
    for strategy, size in WORLDS:
        train_world(size, tmp_path / strategy, *options, f"strategy={strategy}")
    x = build(tmp_path / "again", *options, "strategy=local")
    results = Trainer(x).run()
    assert {text(tmp_path / strategy) for strategy, _ in WORLDS} == {text(tmp_path / "again")}
    records = read_test_predictions(str(tmp_path / "again"))
    learner = x.learner.eval()
    for record, key in zip(records, task_keys(9, "test", 0, range(7)), strict=True):
        episode = x.tasks.sample(key)
        predictions = learner(episode).predictions.argmax(-1)
        assert record["labels"] == episode.query.targets.tolist() == [0, 0, 1, 1, 2, 2]
        assert record["predictions"] == predictions.tolist()
        correct = (predictions == episode.query.targets).float().mean()
        assert record["accuracy"] == pytest.approx(correct.item(), abs=1e-7)
        assert (record["classes"], record["query_images"]) == x.tasks.describe(key)
    assert [record["task"] for record in records] == list(range(7))
    mean = sum(record["accuracy"] for record in records) / 7
    assert results["test_accuracy"] == pytest.approx(mean, abs=1e-12)
    loss = sum(record["loss"] for record in records) / 7
    assert results["test_loss"] == pytest.approx(loss, abs=1e-12)


def test_metrics_are_the_same_with_and_without_predictions(tmp_path):
    x = build(tmp_path, "strategy=local")
    keys = task_keys(0, "test", 0, range(7))
    found = [
        evaluate(
            x.strategy,
            replace(x.evaluate_mapper, return_predictions=asked),
            x.learner,
            keys,
            lambda some: make_batch(x, some),
        )
        for asked in (False, True)
    ]
    assert found[0].metrics.keys() == found[1].metrics.keys()
    assert all(torch.equal(found[1].metrics[n], each) for n, each in found[0].metrics.items())
    assert not found[0].predictions and len(found[1].predictions) == 7


def unequal_queries(directory: str, *overrides: str) -> None:
    """A run whose test tasks have different numbers of queries."""
    x = build(directory, *overrides)
    sample = x.tasks.sample

    def shortened(key):
        episode = sample(key)
        left = 1 + int(key[3]) % 5
        return Episode(episode.support, Examples(*(each[:left] for each in episode.query)))

    x.tasks.sample = shortened
    Trainer(x).run()


@pytest.mark.slow
def test_tasks_may_have_unequal_numbers_of_queries(tmp_path):
    for strategy, size in (("local", 1), ("rpc", 2), ("allreduce", 2)):
        run_world(unequal_queries, size, str(tmp_path / strategy), f"strategy={strategy}")
    assert text(tmp_path / "local") == text(tmp_path / "rpc") == text(tmp_path / "allreduce")
    records = read_test_predictions(tmp_path / "local")
    assert [len(record["predictions"]) for record in records] == [1, 2, 3, 4, 5, 1, 2]
    for record in records:
        pairs = list(zip(record["labels"], record["predictions"], strict=True))
        correct = sum(label == prediction for label, prediction in pairs) / len(pairs)
        assert record["accuracy"] == pytest.approx(correct, abs=1e-6)


def test_regression_has_targets_and_predictions(tmp_path):
    options = ("dataset=sinusoid", "model=mlp", "model.hidden=[8]", "model.batch_norm=false")
    groups = ("++dataset.", "model.", "task.")
    small = [item for item in SMALL if not item.startswith(groups)]
    configuration = compose(*small, *options, "task.queries=4", "strategy=local")
    x = build_experiment(configuration, tmp_path, "maml")
    results = Trainer(x).run()
    records = read_test_predictions(tmp_path)
    for record, key in zip(records, task_keys(0, "test", 0, range(7)), strict=True):
        targets, predictions = torch.tensor(record["targets"]), torch.tensor(record["predictions"])
        torch.testing.assert_close(targets, x.tasks.sample(key).query.targets, rtol=1e-5, atol=1e-6)
        mse = (targets - predictions).square().mean().item()
        assert record["mse"] == pytest.approx(mse, rel=1e-3)
    mean = sum(record["mse"] for record in records) / 7
    assert results["test_mse"] == pytest.approx(mean, rel=1e-12)
    assert "test_accuracy" not in results


def test_a_learner_without_predictions_leaves_them_out(tmp_path):
    x = build(tmp_path, "strategy=local")
    forward = x.learner.forward

    def without_predictions(episode):
        result = forward(episode)
        return TaskResult(result.loss, result.metrics)

    x.learner.forward = without_predictions
    x.tasks.describe = lambda key: None
    x.state.train_seconds = 1.0
    Trainer(x).test(tmp_path / TEST_PREDICTIONS_FILE)
    for record in read_test_predictions(tmp_path):
        assert record["predictions"] is record["labels"] is record["classes"] is None
        assert 0 <= record["accuracy"] <= 1


def test_sixty_tasks_are_less_than_a_hundred_kilobytes(tmp_path):
    sizes = ("task.ways=5", "task.queries=15", "++dataset.examples=20", "trainer.eval_tasks=60")
    x = build(tmp_path, "strategy=local", "algorithm=prototypical", *sizes)
    x.state.train_seconds = 1.0
    Trainer(x).test(tmp_path / TEST_PREDICTIONS_FILE)
    assert len(read_test_predictions(tmp_path)) == 60
    assert (tmp_path / TEST_PREDICTIONS_FILE).stat().st_size < 1e5


def test_predictions_of_another_shape_than_the_targets_are_left_out():
    values = query_values(torch.zeros(2, 3, 4), torch.zeros(2, 3, 1))
    assert values[QUERIES].tolist() == [0, 0]
    assert [len(part) for task in split_queries(values) for part in task] == [0] * 4
