"""How learners of sinusoid runs adapt, drawn beside each other."""

import numpy as np
import pytest
import torch
from tiny import compose

from metadist.config import build_experiment
from metadist.errors import UserError
from metadist.plots import adaptation
from metadist.tasks import Sinusoid, key_generator, task_keys
from metadist.training import adaptation as figure
from metadist.training import draw_adaptation, run
from metadist.training.checkpoints import read_checkpoint
from metadist.training.resume import checkpoints_of, contents_of

WORDS = (
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


def sinusoid(directory, *words, trained=True):
    x = build_experiment(compose(*WORDS, *words), directory, "maml")
    if trained:
        run(x)
        x = build_experiment(compose(*WORDS, *words, "resume=auto"), directory, "maml")
    return x


def test_the_wave_is_the_one_of_the_episode():
    key = task_keys(3, "test", 0, range(2))[1]
    episode = Sinusoid().episode(key_generator(key), "test", 1, 4, 6)
    for part in episode:
        wave = Sinusoid().curve(key_generator(key), part.inputs.double().numpy())
        np.testing.assert_allclose(wave, part.targets.numpy(), atol=1e-5)


def test_both_learners_adapt_to_the_same_points_each_in_its_own_way(tmp_path, monkeypatch):
    shown = []

    def draw(rows, path, title):
        shown.extend(rows)
        return adaptation.adaptation_panels(rows, path, title)

    monkeypatch.setattr(figure, "adaptation_panels", draw)
    maml = sinusoid(tmp_path / "maml")
    pretrained = sinusoid(tmp_path / "pretrained", "algorithm.inner_steps=0")
    runs = {"MAML": maml, "pretrained": pretrained}
    path = draw_adaptation(tmp_path / "deep" / "figure.png", runs, tasks=2)
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 20_000
    assert len(shown) == 2 and maml.learner.eval_inner_steps == 3
    for row in shown:
        left, right = row["MAML"], row["pretrained"]
        np.testing.assert_array_equal(left.support_inputs, right.support_inputs)
        assert left.support_inputs.shape == (5,) and list(left.predicted) == [0, 1, 10]
        assert not np.allclose(left.predicted[0], right.predicted[0])
        assert not np.allclose(left.predicted[0], left.predicted[1])
        assert not np.allclose(left.predicted[1], left.predicted[10])
    # What the drawing shows is what the evaluation answers, up to how fine the grid is.
    episode = maml.tasks.sample(task_keys(0, "test", 0, range(1))[0])
    maml.learner.eval_inner_steps = 10
    answers = maml.learner.eval()(episode).predictions.detach().numpy().ravel()
    picture = shown[0]["MAML"]
    at = np.interp(episode.query.inputs.numpy().ravel(), picture.inputs, picture.predicted[10])
    np.testing.assert_allclose(at, answers, atol=0.02)


def test_what_cannot_be_drawn_is_refused(tmp_path):
    five = sinusoid(tmp_path / "five", trained=False)
    with pytest.raises(UserError, match="holds no checkpoint"):
        draw_adaptation(tmp_path / "figure.png", {"five": five})
    ten = sinusoid(tmp_path / "ten", "task.shots=10", trained=False)
    with pytest.raises(UserError, match="different numbers of points"):
        draw_adaptation(tmp_path / "figure.png", {"five": five, "ten": ten})
    glyphs = build_experiment(compose("strategy=local", "logger=jsonl"), tmp_path / "g", "maml")
    with pytest.raises(UserError, match="no run of an algorithm with inner steps on dataset=sin"):
        draw_adaptation(tmp_path / "figure.png", {"glyphs": glyphs})


@pytest.mark.parametrize("tested", ["last", "best"])
def test_the_state_that_was_tested_is_drawn(tmp_path, tested):
    x = sinusoid(tmp_path, "trainer.eval_every=1", f"trainer.test_checkpoint={tested}")
    saved = checkpoints_of(x)
    untrained = sinusoid(tmp_path / "untrained", trained=False)
    saved.save_best(x.trainer.iterations, contents_of(untrained))
    path = {"last": saved.newest(), "best": saved.best}[tested]
    draw_adaptation(tmp_path / "figure.png", {"MAML": x}, tasks=1)
    judged = read_checkpoint(path)["learner"]
    drawn = x.learner.state_dict()
    assert all(torch.equal(drawn[name], judged[name]) for name in judged)
    same = [torch.equal(drawn[n], v) for n, v in untrained.learner.state_dict().items()]
    assert all(same) == (tested == "best")
