"""The trainer: files of a run, stopping and resuming with identical results."""

import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from omegaconf import DictConfig
from tiny import (
    SMALL,
    build,
    compose,
    records,
    run_results,
    train,
    train_world,
    without_times,
)
from worlds import run_world

from metadist.config import build_experiment
from metadist.errors import UserError
from metadist.training import Interrupted, LocalStrategy, Trainer
from metadist.training import trainer as trainer_module
from metadist.training.checkpoints import read_checkpoint

RESULTS = {
    "test_accuracy",
    "ci95",
    "test_tasks",
    "train_loss",
    "iterations",
    "tasks_per_second",
    "wall_seconds",
    "world_size",
    "strategy",
    "seed",
    "protocol",
}
PROTOCOL = {
    "ways",
    "shots",
    "queries",
    "inner_steps",
    "eval_inner_steps",
    "split",
    "rotations",
    "batch_norm",
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The directory of a finished run, for tests that do not change it."""
    directory = tmp_path_factory.mktemp("whole")
    train(str(directory), "strategy=local")
    return directory


def test_a_run_writes_the_listed_files(tmp_path):
    train_world(2, tmp_path, "trainer.report=true")
    results = run_results(tmp_path)
    assert results.keys() >= RESULTS
    assert results["protocol"].keys() >= PROTOCOL
    assert (results["iterations"], results["world_size"], results["strategy"]) == (4, 2, "rpc")
    assert results["test_tasks"] == 7 and 0 <= results["test_accuracy"] <= 1
    training = [line for line in records(tmp_path) if "train_loss" in line]
    assert [line["iteration"] for line in training] == [1, 2, 3, 4]
    assert training[-1]["train_loss"] == results["train_loss"]
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {
        "checkpoints",
        "learning_curves.png",
        "metrics.jsonl",
        "report.html",
        "results.json",
        "test_predictions.jsonl",
        "test_tasks.json",
        "test_tasks.png",
    }
    saved = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    numbered = ["iteration-00000002.pt", "iteration-00000004.pt"]
    assert saved in (
        ["best-00000002.pt", *numbered],
        [f"best-0000000{i}.pt" for i in (2, 4)] + numbered,
    )


def test_a_step_pays_for_its_record_and_not_for_checkpoints(tmp_path, monkeypatch):
    now = 0.0

    def taking(seconds: float, function):
        def slow(*given):
            nonlocal now
            now += seconds
            return function(*given)

        return slow

    monkeypatch.setattr(trainer_module, "time", SimpleNamespace(perf_counter=lambda: now))
    every = ("trainer.checkpoint_every=1", "trainer.keep_checkpoints=1")
    x = build(str(tmp_path), "strategy=local", *every)
    x.logger.log_metrics = taking(1.0, x.logger.log_metrics)
    x.strategy.forward_backward = taking(10.0, x.strategy.forward_backward)
    monkeypatch.setattr(
        trainer_module, "checkpoint_contents", taking(100.0, trainer_module.checkpoint_contents)
    )
    Trainer(x).run()
    training = [line for line in records(tmp_path) if "train_loss" in line]
    assert [line["seconds"] for line in training] == [10.0, 21.0, 32.0, 43.0]
    kept = (tmp_path / "checkpoints").glob("iteration-*")
    assert [path.name for path in kept] == ["iteration-00000004.pt"]


def test_metrics_are_flushed_before_each_checkpoint(tmp_path):
    x, found = build(tmp_path, "strategy=local", "trainer.eval_every=0"), []
    x.logger.flush = lambda: found.append([*(tmp_path / "checkpoints").glob("*")])
    Trainer(x).run()
    assert list(map(len, found)) == [0, 1]  # of iterations 2 and 4


def test_the_logged_rate_is_that_of_each_step(tmp_path, monkeypatch):
    now, compute = 0.0, LocalStrategy.forward_backward

    def slower_and_slower(strategy, mapper, learner, batch, *others):
        nonlocal now
        iteration = batch.keys[0, 2].item()
        now += 5.0 * iteration
        return compute(strategy, mapper, learner, batch, *others)

    monkeypatch.setattr(trainer_module, "time", SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(LocalStrategy, "forward_backward", slower_and_slower)
    results = train(str(tmp_path), "strategy=local")
    training = [line for line in records(tmp_path) if "train_loss" in line]
    assert [5 / line["tasks_per_second"] for line in training] == pytest.approx([5, 10, 15, 20])
    assert results["tasks_per_second"] == pytest.approx(20 / 50)


def interrupted(directory: Path, after: int, configuration: DictConfig) -> str:
    """Train, with a signal to every rank once rank zero has recorded iteration `after`."""
    x = build_experiment(configuration, directory, "maml")
    log_metrics = x.logger.log_metrics

    def record_and_stop(line) -> None:
        log_metrics(line)
        if line["iteration"] == after and "train_loss" in line:
            os.kill(os.getpid(), signal.SIGTERM)

    x.logger.log_metrics = record_and_stop
    try:
        Trainer(x).run()
    except Interrupted as error:
        return f"{type(error).__name__}: {error}"
    return "finished"


@pytest.mark.parametrize(
    ("strategy", "after"),  # the first checkpoint is that of iteration 2
    [
        ("allreduce", 2),
        pytest.param("allreduce", 1, marks=pytest.mark.slow),
        pytest.param("rpc", 1, marks=pytest.mark.slow),
        pytest.param("rpc", 2, marks=pytest.mark.slow),
    ],
)
def test_stopped_and_resumed_ends_as_if_it_had_not_been(tmp_path, whole, strategy, after):
    configuration = compose(*SMALL, f"strategy={strategy}")
    message = run_world(interrupted, 2, tmp_path, after, configuration)[0]
    assert message.startswith("Interrupted: stopped at iteration") and "resume=auto" in message
    assert not (tmp_path / "results.json").exists()
    train_world(2, tmp_path, "resume=auto", f"strategy={strategy}")
    assert without_times(records(tmp_path)) == without_times(records(whole))
    left, right = (
        read_checkpoint(directory / "checkpoints/iteration-00000004.pt")["learner"]
        for directory in (whole, tmp_path)
    )
    assert all(torch.equal(tensor, right[name]) for name, tensor in left.items())


def test_a_trainer_steps_validates_and_saves_without_a_run(tmp_path, whole):
    trainer = Trainer(build(tmp_path, "strategy=local", "logger=[console,tensorboard]"))
    losses = [trainer.train_step(iteration).loss for iteration in (1, 2)]
    trainer.validate()
    trainer.save_checkpoint()
    assert not (tmp_path / "metrics.jsonl").exists()
    trainer.run()
    training = [line for line in records(whole) if "train_loss" in line]
    assert losses == [line["train_loss"] for line in training[:2]]
    written = [line for line in records(tmp_path) if "train_loss" in line]
    assert without_times(written) == without_times(training[2:])
    trainer.validate()  # the loggers are closed


@pytest.mark.parametrize("strategy", ["local", "rpc"])
def test_a_caller_without_gradients_trains_all_the_same(tmp_path, whole, strategy):
    with torch.no_grad():
        train(str(tmp_path), f"strategy={strategy}")
    assert without_times(records(tmp_path)) == without_times(records(whole))


def test_resume_auto_without_a_checkpoint_starts_anew(tmp_path, whole):
    train(str(tmp_path), "strategy=local", "resume=auto")
    assert without_times(records(tmp_path)) == without_times(records(whole))


def test_an_earlier_run_is_not_overwritten(whole):
    before = records(whole)
    with pytest.raises(UserError, match="resume=auto"):
        train(str(whole), "strategy=local")
    assert records(whole) == before


def test_a_checkpoint_that_does_not_fit_is_refused(whole):
    for override, message in (
        ("model.filters=5", r"another run: model\.filters was 4"),
        ("task.ways=4 seed=1", r"another run: seed was 0 there and is 1 now, task\.ways was 3"),
        ("trainer.iterations=1", r"more than trainer\.iterations=1"),
    ):
        with pytest.raises(UserError, match=message):
            build(whole, "strategy=local", "resume=auto", *override.split())


def test_supervised_training_counts_samples_and_says_what_is_measured(tmp_path, capsys):
    options = ("task.ways=3", "task.micro_batch_size=4", "logger=console")
    small = [item for item in SMALL if not item.startswith(("task.", "logger"))]
    configuration = compose(*small, *options, "strategy=local", name="ddp")
    results = Trainer(build_experiment(configuration, tmp_path, "ddp")).run()
    assert results["samples_per_second"] == 4 * results["tasks_per_second"]
    training = [line for line in records(tmp_path) if "train_loss" in line]
    assert all(each["samples_per_second"] == 4 * each["tasks_per_second"] for each in training)
    text = capsys.readouterr().out
    assert "samples/s" in text and "tasks/s" not in text
    assert "(classification of held-out examples, 12 training classes)" in text
    assert "over 7 tasks (few-shot: 3-way 1-shot tasks of unseen classes)" in text
