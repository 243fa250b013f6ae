"""Learning curves of several runs beside each other, and panels of adaptation."""

import numpy as np
import pytest
from PIL import Image

from metadist.errors import UserError
from metadist.plots import (
    AdaptationPicture,
    ComparedCurves,
    adaptation_panels,
    compared_curves,
    comparison,
)
from metadist.plots.sheet import smoothed


def records(metric: str, offset: float) -> list[dict]:
    training = [
        {"iteration": i, "train_loss": 1 / i, f"train_{metric}": 1 / i} for i in range(1, 100)
    ]
    validation = [
        {"iteration": i, f"validation_{metric}": offset + i / 200} for i in range(10, 100, 10)
    ]
    return [*validation[::-1], *training]


def test_every_run_is_drawn_seeds_in_one_colour(tmp_path, monkeypatch):
    drawn = []

    class Watched:
        def __init__(self, axes):
            self.axes = axes

        def plot(self, x, y, style, **options):
            drawn.append((list(x), list(y), options["color"], options["label"]))
            return self.axes.plot(x, y, style, **options)

        def __getattr__(self, name):
            return getattr(self.axes, name)

    panel = comparison._panel
    monkeypatch.setattr(comparison, "_panel", lambda axes, p: panel(Watched(axes), p))
    seeds = [records("accuracy", 0.1), records("accuracy", 0.2)]
    only_training = [r for r in records("mse", 0) if "train_mse" in r]
    panels = [
        ComparedCurves("a $task$", "accuracy", {"one": seeds, "two": [records("accuracy", 0.3)]}),
        ComparedCurves("another", "mse", {"three": [only_training], "four": [[]]}),
    ]
    path = compared_curves(panels, tmp_path / "curves.png", "Two panels")
    assert Image.open(path).size[0] > 1000
    one, again, two, three, four = drawn
    assert one[0] == list(range(10, 100, 10)) and one[1] == pytest.approx(
        [0.1 + i / 200 for i in range(10, 100, 10)]
    )
    assert one[2] == again[2] != two[2] and (one[3], again[3], two[3]) == ("one", None, "two")
    assert three[3] == "three, training" and len(three[0]) == 99
    assert four[3] == "four, no record" and four[0] == []


def test_a_panel_for_each_learner_and_curve(tmp_path):
    x = np.linspace(-5, 5, 50)
    wild = {0: np.zeros(50), 1: 1e9 * x, 10: np.full(50, np.nan)}
    calm = {0: np.zeros(50), 1: np.sin(x) / 2, 10: np.sin(x)}
    row = {
        name: AdaptationPicture(x, np.sin(x), x[::10], np.sin(x[::10]), predicted)
        for name, predicted in (("MAML", calm), ("pretrained", wild))
    }
    small = adaptation_panels([row], tmp_path / "one.png", "One curve")
    large = adaptation_panels([row, row, row], tmp_path / "three.png", "Three curves")
    sizes = [Image.open(path).size for path in (small, large)]
    assert sizes[0][0] == sizes[1][0] and sizes[1][1] > 2 * sizes[0][1]
    with pytest.raises(UserError):
        adaptation_panels([row], tmp_path / "no folder" / "x.png", "t")


def test_a_value_that_is_not_finite_leaves_its_neighbours_smooth():
    values = np.array([1.0, 2.0, np.nan, 4.0, 5.0])
    np.testing.assert_allclose(smoothed(values, 3), [1.5, 1.5, 3.0, 4.5, 4.5])
    training = [{"iteration": i, "train_mse": np.nan if i == 60 else 1.0} for i in range(1, 151)]
    iterations, drawn, _ = comparison._course(training, "mse")
    assert len(iterations) == 150 and np.allclose(drawn, 1.0)
