"""Plots of adaptation by number of inner steps, of sinusoid runs."""

import numpy as np
import pytest
import torch
from PIL import Image
from reproduction import adaptation
from reproduction.adaptation import AdaptationData, plot_adaptation, plot_rows
from tiny import build, compose

from metadist.config import build_experiment
from metadist.errors import UserError
from metadist.tasks import Sinusoid, key_generator, task_keys
from metadist.training import Trainer
from metadist.training.checkpoints import read_checkpoint
from metadist.training.saved_state import checkpoint_contents, checkpoints_of

OVERRIDES = (
    *("dataset=sinusoid", "model=mlp", "model.hidden=[8]", "model.batch_norm=false"),
    *("task.shots=5", "task.queries=3", "algorithm.inner_lr=0.01", "strategy=local"),
    *("logger=jsonl", "trainer.iterations=3", "trainer.eval_every=0", "trainer.eval_tasks=3"),
    "trainer.report=false",
)
INPUTS = np.linspace(-5, 5, 50)


def row():
    diverging = {0: np.zeros(50), 1: 1e9 * INPUTS, 10: np.full(50, np.nan)}
    good = {0: np.zeros(50), 1: np.sin(INPUTS) / 2, 10: np.sin(INPUTS)}
    support = INPUTS[::10], np.sin(INPUTS[::10])
    return {
        name: AdaptationData(INPUTS, np.sin(INPUTS), *support, predictions)
        for name, predictions in (("MAML", good), ("pretrained", diverging))
    }


def test_one_panel_per_learner_and_curve(tmp_path, saved_figures):
    one = plot_rows([row()], tmp_path / "one.png", "One curve")
    three = plot_rows([row()] * 3, tmp_path / "three.png", "Three curves")
    sizes = [Image.open(path).size for path in (one, three)]
    assert sizes[0][0] == sizes[1][0] and sizes[1][1] > 2 * sizes[0][1]
    assert [len(figure.axes) for figure in saved_figures] == [2, 6]
    axes = saved_figures[0].axes[0]
    labels = [line.get_label() for line in axes.lines]
    assert labels == ["truth", "before", "after 1 step", "after 10 steps"]
    assert axes.get_title().startswith("MAML: MSE ") and axes.get_title().endswith(" → 0")
    assert np.isfinite(saved_figures[0].axes[1].get_ylim()).all()
    assert axes.get_title() == f"MAML: MSE {np.mean(np.sin(INPUTS) ** 2):.2g} → 0.13 → 0"
    (points,) = [c for c in axes.collections if c.get_label() == "points used"]
    np.testing.assert_allclose(points.get_offsets(), np.stack([INPUTS, np.sin(INPUTS)], 1)[::10])
    assert axes.get_ylim()[1] < 10  # the diverging predictions of the other panel are cut off


def test_missing_folder_is_a_user_error(tmp_path):
    with pytest.raises(UserError):
        plot_rows([row()], tmp_path / "no folder" / "x.png", "t")


def sinusoid(directory, *overrides, trained=True):
    configuration = compose(*OVERRIDES, *overrides)
    x = build_experiment(configuration, directory, "maml")
    if trained:
        Trainer(x).run()
        configuration.resume = "auto"
        x = build_experiment(configuration, directory, "maml")
    return x


def test_the_curve_is_the_one_of_the_episode():
    key = task_keys(3, "test", 0, range(2))[1]
    episode = Sinusoid().episode(key_generator(key), "test", 1, 4, 6)
    for part in episode:
        curve = Sinusoid().curve(key_generator(key), part.inputs.double().numpy())
        np.testing.assert_allclose(curve, part.targets.numpy(), atol=1e-5)


def test_learners_adapt_to_the_same_points_each_by_its_own_method(tmp_path, monkeypatch):
    shown = []
    original = adaptation.plot_rows

    def plot(rows, path, title):
        shown.extend(rows)
        return original(rows, path, title)

    monkeypatch.setattr(adaptation, "plot_rows", plot)
    maml = sinusoid(tmp_path / "maml")
    pretrained = sinusoid(tmp_path / "pretrained", "algorithm.inner_steps=0")
    runs = {"MAML": maml, "pretrained": pretrained}
    path = plot_adaptation(tmp_path / "deep" / "plot.png", runs, tasks=2)
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 20_000
    assert len(shown) == 2 and maml.learner.eval_inner_steps == 3
    for row in shown:
        left, right = row["MAML"], row["pretrained"]
        np.testing.assert_array_equal(left.support_inputs, right.support_inputs)
        assert left.support_inputs.shape == (5,) and list(left.predictions) == [0, 1, 10]
        assert not np.allclose(left.predictions[0], right.predictions[0])
        assert not np.allclose(left.predictions[0], left.predictions[1])
        assert not np.allclose(left.predictions[1], left.predictions[10])
    # The plot shows the predictions of the evaluation, up to the spacing of the grid.
    episode = maml.tasks.sample(task_keys(0, "test", 0, range(1))[0])
    maml.learner.eval_inner_steps = 10
    predictions = maml.learner.eval()(episode).predictions.detach().numpy().ravel()
    data = shown[0]["MAML"]
    plotted = np.interp(episode.query.inputs.numpy().ravel(), data.inputs, data.predictions[10])
    np.testing.assert_allclose(plotted, predictions, atol=0.02)


def test_runs_that_cannot_be_plotted_are_refused(tmp_path):
    five = sinusoid(tmp_path / "five", trained=False)
    with pytest.raises(UserError, match="holds no checkpoint"):
        plot_adaptation(tmp_path / "plot.png", {"five": five})
    ten = sinusoid(tmp_path / "ten", "task.shots=10", trained=False)
    with pytest.raises(UserError, match="different numbers of points"):
        plot_adaptation(tmp_path / "plot.png", {"five": five, "ten": ten})
    glyphs = build(tmp_path / "g", "strategy=local")
    with pytest.raises(UserError, match="no run of an algorithm with inner steps on dataset=sin"):
        plot_adaptation(tmp_path / "plot.png", {"glyphs": glyphs})


@pytest.mark.parametrize("tested", ["last", "best"])
def test_the_tested_state_is_plotted(tmp_path, tested):
    x = sinusoid(tmp_path, "trainer.eval_every=1", f"trainer.test_checkpoint={tested}")
    saved = checkpoints_of(x)
    untrained = sinusoid(tmp_path / "untrained", trained=False)
    saved.save_best(x.trainer_config.iterations, checkpoint_contents(untrained))
    path = {"last": saved.newest(), "best": saved.best}[tested]
    plot_adaptation(tmp_path / "plot.png", {"MAML": x}, tasks=1)
    evaluated = read_checkpoint(path)["learner"]
    plotted = x.learner.state_dict()
    assert all(torch.equal(plotted[name], evaluated[name]) for name in evaluated)
    same = [torch.equal(plotted[n], v) for n, v in untrained.learner.state_dict().items()]
    assert all(same) == (tested == "best")
