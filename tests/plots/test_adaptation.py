"""Plots of adaptation by number of inner steps."""

import numpy as np
import pytest
from PIL import Image

from metadist.errors import UserError
from metadist.plots import AdaptationData, plot_adaptation

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
    one = plot_adaptation([row()], tmp_path / "one.png", "One curve")
    three = plot_adaptation([row()] * 3, tmp_path / "three.png", "Three curves")
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
        plot_adaptation([row()], tmp_path / "no folder" / "x.png", "t")
