"""A metric of the user's algorithm: from every strategy to files, console, plots and callbacks."""

from pathlib import Path

import pytest
from PIL import Image
from tiny import build, records, train, train_world

from metadist.algorithms import MAML
from metadist.reports import read_results, read_test_predictions
from metadist.training import Trainer

CLASS = f"algorithm._target_={__name__}.MAMLWithConfidence"
SHORT = (CLASS, "trainer.iterations=2", "trainer.eval_every=1")
NAMES = ("confidence", "seen_after_hours")


class MAMLWithConfidence(MAML):
    batches_tasks = True

    def metrics(self, predictions, targets, suffix=""):
        found = super().metrics(predictions, targets, suffix)
        confidence = predictions.detach().softmax(-1).amax(-1).mean(-1)
        return {**found, f"confidence{suffix}": confidence, f"seen_after_hours{suffix}": confidence}


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    """The directory of a run of one process."""
    directory = tmp_path_factory.mktemp("local")
    train(str(directory), *SHORT, "strategy=local")
    return directory


@pytest.mark.parametrize("strategy", ["rpc", "allreduce"])
def test_an_own_metric_is_in_all_files_and_equal_for_every_strategy(tmp_path, alone, strategy):
    train_world(2, tmp_path, *SHORT, f"strategy={strategy}")
    world, local = read_results(tmp_path), read_results(alone)
    tasks = read_test_predictions(tmp_path)
    assert local["method"]["algorithm"] == "MAMLWithConfidence"
    for name in NAMES:
        assert 1 / 3 <= world[f"test_{name}"] == local[f"test_{name}"] <= 1
        mean = sum(task[name] for task in tasks) / len(tasks)
        assert mean == pytest.approx(world[f"test_{name}"], rel=1e-12)
        for split in ("train", "validation"):
            both = [
                [line[f"{split}_{name}"] for line in records(directory) if f"{split}_loss" in line]
                for directory in (tmp_path, alone)
            ]
            assert both[0] == both[1] and len(both[0]) == 2
    assert not [name for name in world if name.startswith("test_confidence_")]
    assert not [name for line in records(tmp_path) for name in line if name.endswith("_before")]


def test_an_own_metric_is_on_the_console_and_in_the_plots(tmp_path, capsys):
    options = ("strategy=local", "trainer.report=true")
    train(str(tmp_path / "plain"), *options)
    Trainer(build(tmp_path / "own", CLASS, *options, "logger=console", omit=("logger",))).run()
    text = capsys.readouterr().out
    for split in ("validation", "test metrics"):
        line = next(line for line in text.splitlines() if split in line)
        assert "confidence 0." in line and "seen_after_hours 0." in line
    plain, own = (
        Image.open(tmp_path / name / "learning_curves.png").size for name in ("plain", "own")
    )
    assert own[0] * own[1] > 1.9 * plain[0] * plain[1]  # four panels instead of two


def test_early_stopping_by_an_own_metric(tmp_path):
    options = ("callbacks=early_stopping", "callbacks.early_stopping.metric=confidence")
    stop = ("callbacks.early_stopping.mode=max", "callbacks.early_stopping.min_delta=1")
    patience = ("callbacks.early_stopping.patience=1", "trainer.eval_every=1")
    results = train(str(tmp_path), CLASS, "strategy=local", *options, *stop, *patience)
    assert results["iterations"] == 2
