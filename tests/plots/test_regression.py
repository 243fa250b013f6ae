"""Plots of regression tasks."""

import numpy as np
import pytest
from png_files import check_png

from metadist.plots import RegressionData, plot_regression_tasks


@pytest.mark.parametrize("tasks", [1, 4, 5])
def test_one_panel_per_task(tmp_path, saved_figures, tasks):
    inputs = np.random.default_rng(0).uniform(-5, 5, (50, 1))
    task = RegressionData(
        inputs[:5], np.sin(inputs[:5]), inputs, np.sin(inputs), 0 * inputs, np.sin(inputs) + 0.1
    )
    check_png(plot_regression_tasks([task] * tasks, tmp_path / "tasks.png", "sinusoid"))
    (figure,) = saved_figures
    shown = [axes for axes in figure.axes if axes.get_visible()]
    assert len(shown) == tasks
    columns = {1: 1, 4: 2, 5: 3}[tasks]  # the outer panels have labels
    assert [axes.get_ylabel() == "output" for axes in shown] == [
        index % columns == 0 for index in range(tasks)
    ]
    assert [axes.get_xlabel() == "input" for axes in shown] == [
        index >= tasks - columns for index in range(tasks)
    ]
    truth, before, after = shown[0].lines
    np.testing.assert_allclose(truth.get_xdata(), np.sort(inputs.ravel()))
    np.testing.assert_allclose(before.get_ydata(), 0)
    np.testing.assert_allclose(after.get_ydata(), truth.get_ydata() + 0.1)
    assert shown[0].get_title() == f"task 1: MSE {np.mean(np.sin(inputs) ** 2):.3g} → 0.01"
    (points,) = shown[0].collections
    np.testing.assert_allclose(points.get_offsets(), np.hstack([inputs, np.sin(inputs)])[:5])
    labels = [text.get_text() for text in figure.legends[0].texts]
    assert labels[1:] == ["before adaptation", "after adaptation", "support points, adapted on"]


def test_a_single_query_is_a_point(tmp_path, saved_figures):
    one = np.ones((1, 1))
    task = RegressionData(one, one, one, one, one, one)
    plot_regression_tasks([task], tmp_path / "tasks.png", "one query")
    assert [line.get_marker() for line in saved_figures[0].axes[0].lines] == ["o"] * 3


def test_a_learner_without_predictions_before_adaptation(tmp_path, saved_figures):
    some = np.linspace(0, 1, 5)
    task = RegressionData(some, some, some, some, np.empty(0), some + 0.5)
    plot_regression_tasks([task], tmp_path / "tasks.png", "a conditional process")
    assert [line.get_label() for line in saved_figures[0].axes[0].lines] == [
        "truth",
        "after adaptation",
    ]
    assert saved_figures[0].axes[0].get_title() == "task 1: MSE 0.25"


def test_a_plot_does_not_follow_a_link(tmp_path):
    (tmp_path / "own").write_text("mine")
    (tmp_path / "tasks.png").symlink_to(tmp_path / "own")
    task = RegressionData(*[np.linspace(0, 1, 5)] * 6)
    check_png(plot_regression_tasks([task], tmp_path / "tasks.png", "link"))
    assert (tmp_path / "own").read_text() == "mine"
