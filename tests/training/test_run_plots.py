"""Plots of runs: which tasks can be plotted, and how sinusoid learners adapt."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny import build, compose, records, without_times
from torch import nn

from metadist import plots
from metadist.algorithms import MAML, Learner, TaskResult
from metadist.config import build_experiment
from metadist.loggers import JsonlLogger, Logger, LoggerCollection
from metadist.loggers.formatting import summarize_results
from metadist.reports import read_test_predictions
from metadist.tasks import Episode, Examples, task_keys
from metadist.training import Trainer
from metadist.training.run_plots import (
    plot_run,
    plot_task,
    plot_validation_tasks,
)

OVERRIDES = (
    "dataset=sinusoid",
    "model=mlp",
    "model.hidden=[8]",
    "model.batch_norm=false",
    "task.shots=5",
    "task.queries=3",
    "algorithm.inner_lr=0.01",
    "strategy=local",
    "logger=jsonl",
    "trainer.iterations=3",
    "trainer.eval_every=0",
    "trainer.eval_tasks=3",
)


def tasks_of(shape: tuple[int, ...], outputs: int | None, support: int) -> SimpleNamespace:
    """Tasks with inputs of a shape and a number of support examples; with `outputs`, a
    regression.
    """
    targets = torch.zeros(2, dtype=torch.int64) if outputs is None else torch.zeros(2, outputs)
    query = Examples(torch.zeros(2, *shape), targets)
    return SimpleNamespace(
        regression=outputs is not None,
        input_shape=shape,
        outputs=outputs or 2,
        sample=lambda key: Episode(Examples(*(part[:support] for part in query)), query),
    )


@pytest.mark.parametrize(
    ("shape", "outputs", "support"),
    [
        ((2, 8, 8), None, 2),
        ((4, 8, 8), None, 2),
        ((5,), None, 2),
        ((2,), 1, 2),
        ((1,), 2, 2),
        ((1, 8, 8), None, 0),
    ],
)
def test_tasks_that_cannot_be_plotted_are_left_out(tmp_path, monkeypatch, shape, outputs, support):
    tasks = tasks_of(shape, outputs, support)
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1, "train_loss": 1.0}\n')
    results = {"test_accuracy": 0.5, "test_mse": 0.5, "ci95": 0.1}
    metric = "accuracy" if outputs is None else "mse"
    x = SimpleNamespace(directory=tmp_path, title="tasks", tasks=tasks, metric=metric)
    x.learner = x.evaluated_learner = torch.nn.Identity()
    x.split_descriptions = {"test": "of others"}
    x.configuration = {"algorithm": {"inner_steps": 1}}
    x.trainer_config = SimpleNamespace(eval_seed=0, eval_tasks=1)
    curves, draw = [], plots.plot_learning_curves
    monkeypatch.setattr(
        plots, "plot_learning_curves", lambda *given: curves.append(given) or draw(*given)
    )
    (path,) = plot_run(x, results)
    line = {"iteration": 1, "train_loss": 1.0}
    assert curves == [
        ([line], path, "tasks", (0.5, 0.1), {"test": "of others"}, {"inner_steps": 1})
    ]
    assert path == tmp_path / "learning_curves.png" and path.exists()
    key = task_keys(0, "test", 0, range(1))[0]
    assert plot_task(tmp_path / "task.png", x, key) is None


class PanelLogger(Logger):
    """Remembers the panels."""

    def __init__(self):
        self.panels = []

    @property
    def shows_panels(self):
        return True

    def log_panels(self, iteration, values, images):
        self.panels.append((iteration, values, [path.name for path in images]))


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param((), marks=pytest.mark.slow),
        # Random numbers, and counts.
        ("model.dropout=0.5", "algorithm=maml_plus_plus", "algorithm.inner_steps=2"),
    ],
)
def test_panels_at_every_validation_do_not_change_the_run(tmp_path, monkeypatch, overrides):
    overrides += ("callbacks=ema", "optimizer.lr=0.5", "trainer.eval_seed=9")
    plain = build(tmp_path / "plain", "strategy=local", *overrides)
    Trainer(plain).run()
    x = build(tmp_path / "panels", "strategy=local", *overrides, "trainer.report=true")
    x.logger = LoggerCollection([JsonlLogger(), panels := PanelLogger()])
    shown, draw = [], plots.plot_test_tasks
    monkeypatch.setattr(
        plots, "plot_test_tasks", lambda tasks, *rest: shown.append(tasks) or draw(tasks, *rest)
    )
    Trainer(x).run()
    # The newest validation and the test are of the averaged weights.
    learner = x.evaluated_learner.eval()
    for data, split, count in zip(shown[1:], ("validation", "test"), (3, 4), strict=True):
        for each, key in zip(data, task_keys(9, split, 0, range(count)), strict=True):
            episode = x.tasks.sample(key)
            np.testing.assert_array_equal(each.query_images, episode.query.inputs)
            predictions = learner(episode).predictions.argmax(1)
            np.testing.assert_array_equal(each.predictions, predictions)
    lines = [without_times(records(tmp_path / name)) for name in ("plain", "panels")]
    assert lines[0] == lines[1]
    assert [iteration for iteration, _, _ in panels.panels] == [2, 4]
    means = [line for line in lines[1] if "validation_loss" in line]
    for (_, values, images), line in zip(panels.panels, means, strict=True):
        assert images == ["validation_tasks.png"] and len(values["validation_accuracy"]) == 3
        for name, each in values.items():
            assert np.mean(each) == pytest.approx(line[name])
    assert (tmp_path / "panels" / "validation_tasks.png").exists()
    assert not (tmp_path / "plain" / "validation_tasks.png").exists()


def test_plots_show_the_predictions_that_were_tested(tmp_path, monkeypatch):
    options = ("algorithm=reptile", "algorithm.eval_inner_batch_size=2", "trainer.eval_tasks=4")
    x = build_experiment(compose(*OVERRIDES, *options), tmp_path, "maml")
    shown, draw = [], plots.plot_regression_tasks
    monkeypatch.setattr(
        plots,
        "plot_regression_tasks",
        lambda tasks, *rest: shown.append(tasks) or draw(tasks, *rest),
    )
    Trainer(x).run()
    tested = read_test_predictions(tmp_path)
    for data, record in zip(shown[-1], tested, strict=True):
        np.testing.assert_allclose(data.predictions_after, record["predictions"], rtol=1e-5)


class LossesAlone(MAML):
    """MAML that returns no predictions."""

    def forward(self, episode):
        return super().forward(episode)._replace(predictions=None)


def test_a_learner_without_predictions_is_trained_tested_and_reported(tmp_path):
    overrides = (
        *("strategy=local", "trainer.iterations=1", "trainer.report=true"),
        f"algorithm._target_={__name__}.LossesAlone",
    )
    x = build(tmp_path, *overrides)
    x.logger = LoggerCollection([JsonlLogger(), panels := PanelLogger()])
    results = Trainer(x).run()
    assert results["test_tasks"] == 7 and (tmp_path / "report.html").exists()
    assert "test metrics" not in dict(summarize_results(results))  # there are none of its own
    assert (tmp_path / "learning_curves.png").exists()
    assert not (tmp_path / "test_tasks.png").exists()
    assert [images for _, _, images in panels.panels] == [[]]


def test_plots_of_validation_tasks_are_of_the_present_weights(tmp_path):
    # Not the device of the parameters, so that the mapper copies them as onto a GPU.
    x = build(tmp_path, "strategy=local", "device=cpu:0")
    (path,) = plot_validation_tasks(x)
    before = path.read_bytes()
    for parameter in x.learner.parameters():
        parameter.detach().neg_()
    assert plot_validation_tasks(x) == [path]
    assert path.read_bytes() != before


class SupportModel(nn.Module):
    """A network of the support set and the inputs, as of a conditional process."""

    def __init__(self, input_shape, outputs):
        super().__init__()
        self.layer = nn.Linear(2, outputs)

    def forward(self, inputs, support):
        mean = support.targets.mean(0, keepdim=True)
        return self.layer(torch.cat([inputs, mean.expand_as(inputs)], 1))


class Conditional(Learner):
    """Predicts from the support set without adaptation."""

    def forward(self, episode):
        predictions = self.model(episode.query.inputs, episode.support)
        loss = self.loss(predictions, episode.query.targets)
        metrics = self.metrics(predictions, episode.query.targets)
        return TaskResult(loss, metrics, None if self.training else predictions)


def test_models_that_are_not_called_with_inputs_alone_have_plots_and_a_report(tmp_path):
    configuration = compose(*OVERRIDES)
    configuration.model = {"_target_": f"{__name__}.SupportModel"}
    configuration.algorithm = {"_target_": f"{__name__}.Conditional"}
    run = build_experiment(configuration, tmp_path, "maml")
    assert Trainer(run).run()["test_mse"] > 0
    assert (tmp_path / "report.html").exists() and (tmp_path / "test_tasks.png").exists()
    key = task_keys(0, "test", 0, range(1))[0]
    assert plot_task(tmp_path / "task.png", run, key) == tmp_path / "task.png"
