"""Learning curves of one run, and of several runs in comparison."""

import math

import numpy as np
import pytest
from PIL import Image
from png_files import GREEN, check_png, count_color

from metadist.errors import UserError
from metadist.plots import (
    ComparisonData,
    learning_curve,
    plot_comparison,
    plot_learning_curves,
)
from metadist.plots.points import moving_average


def run_metrics(metric: str, offset: float) -> list[dict]:
    training = [
        {"iteration": i, "train_loss": 1 / i, f"train_{metric}": 1 / i} for i in range(1, 100)
    ]
    validation = [
        {"iteration": i, f"validation_{metric}": offset + i / 200} for i in range(10, 100, 10)
    ]
    return [*validation[::-1], *training]


@pytest.mark.parametrize(
    "metrics",
    [
        [{"iteration": 1, "train_loss": 1.6, "train_accuracy": 0.2}],
        [{"iteration": 1, "train_loss": 1.6}],
        [{"iteration": i, "train_loss": float("nan") if i % 3 else 1.0 / i} for i in range(1, 99)],
    ],
    ids=["single", "loss alone", "not finite"],
)
def test_learning_curves_of_few_metrics(tmp_path, metrics):
    path = tmp_path / "curves.png"
    assert plot_learning_curves(metrics, path, "100$ and $50 for $x") == path
    check_png(path)


@pytest.mark.parametrize("metric", ["accuracy", "mse"])
def test_learning_curves_with_validation_and_test(tmp_path, metric):
    metrics = [{"iteration": i, "train_loss": 2.0 / i} for i in range(1, 200)]
    metrics += [
        {"iteration": i, "validation_loss": 0.5, f"validation_{metric}": 0.5}
        for i in range(20, 200, 20)
    ]
    path = plot_learning_curves(metrics, tmp_path / "curves.png", "title", test=(0.7, 0.02))
    pixels = check_png(path, width=(1200, 2000))
    assert count_color(pixels, GREEN) > 200  # the dashed line of the test


@pytest.mark.parametrize("metric", ["accuracy", "mse"])
def test_the_curves_are_the_metrics(tmp_path, saved_figures, metric):
    metrics = run_metrics(metric, 0.1)
    descriptions = {"test": "few-shot tasks"} if metric == "mse" else None
    plot_learning_curves(metrics, tmp_path / "curves.png", "t", (0.625, 0.125), descriptions)
    loss, axes = saved_figures[0].axes
    labels = ["training, each iteration", "training, smoothed"]
    assert [line.get_label() for line in loss.lines] == labels  # the test is of the other metric
    each, smooth, validation, test = axes.lines
    assert list(each.get_xdata()) == list(smooth.get_xdata()) == list(range(1, 100))
    assert list(each.get_ydata()) == [1 / i for i in range(1, 100)]
    values = np.array([1 / i for i in range(1, 100)])
    np.testing.assert_allclose(smooth.get_ydata(), moving_average(values, 5))
    assert list(validation.get_xdata()) == list(range(10, 100, 10))
    assert list(validation.get_ydata()) == [0.1 + i / 200 for i in range(10, 100, 10)]
    assert list(test.get_ydata()) == [0.625, 0.625]
    (band,) = axes.patches
    low, high = band.get_extents().transformed(axes.transData.inverted()).intervaly
    assert (low, high) == pytest.approx((0.5, 0.75))
    notes = {
        "accuracy": ("validation, unseen classes", "final test: 62.5% ± 12.5%"),
        "mse": ("validation", "final test: 0.625 ± 0.12, few-shot tasks"),
    }[metric]
    assert (validation.get_label(), " ".join(test.get_label().split())) == notes
    assert axes.get_ylabel() == {"accuracy": "Accuracy", "mse": "Mean squared error"}[metric]
    tick = axes.yaxis.get_major_formatter()(0.5, 0)
    assert (tick == "50%") == (metric == "accuracy")


@pytest.mark.parametrize(
    ("algorithm", "training", "validation"),
    [
        ({"inner_steps": 1, "eval_inner_steps": 3}, " (1 inner step)", " (3 inner steps)"),
        ({"inner_steps": 0, "eval_inner_steps": 10}, " (0 inner steps)", " (10 inner steps)"),
        ({"inner_steps": 5, "eval_inner_steps": 5}, "", ""),
        ({"inner_steps": 5, "eval_inner_steps": None}, "", ""),  # as many as in training
        ({"inner_steps": 5, "eval_inner_steps": "${steps}"}, "", ""),
        ({"eval_inner_steps": 50}, "", ""),
        ({}, "", ""),
    ],
)
def test_the_numbers_of_inner_steps_are_named_if_they_differ(
    tmp_path, saved_figures, algorithm, training, validation
):
    metrics = run_metrics("accuracy", 0.1)
    plot_learning_curves(metrics, tmp_path / "curves.png", "t", algorithm=algorithm)
    labels = [line.get_label().replace("\n", " ") for line in saved_figures[0].axes[1].lines]
    curves = [f"training{training}", f"training{training}, smoothed", f"validation{validation}"]
    assert labels == [f"{curves[0]}, each iteration", curves[1], f"{curves[2]}, unseen classes"]
    traces = learning_curve(metrics, "accuracy", algorithm=algorithm)["data"]
    assert [trace["name"] for trace in traces] == curves


@pytest.mark.parametrize(("metric", "label"), [("accuracy", "62.5%"), ("mse", "0.625")])
def test_a_test_of_a_single_task_has_no_interval(tmp_path, saved_figures, metric, label):
    plot_learning_curves(run_metrics(metric, 0.1), tmp_path / "curves.png", "t", (0.625, math.nan))
    axes = saved_figures[0].axes[1]
    assert axes.lines[-1].get_label() == f"final test: {label}" and not axes.patches


def test_a_few_iterations_are_points(tmp_path, saved_figures):
    for count in (19, 20):
        metrics = [{"iteration": i, "train_loss": 1.0} for i in range(1, count + 1)]
        plot_learning_curves(metrics, tmp_path / "curves.png", "t")
    few, many = (figure.axes[0].lines for figure in saved_figures)
    assert [(line.get_label(), line.get_marker()) for line in few] == [("training", "o")]
    assert [line.get_marker() for line in many] == ["None", "None"]


def test_long_runs_are_smoothed_over_more_iterations(tmp_path, saved_figures):
    values = np.arange(250) % 7 / 7
    metrics = [{"iteration": i + 1, "train_accuracy": value} for i, value in enumerate(values)]
    plot_learning_curves(metrics, tmp_path / "curves.png", "t")
    plot_comparison([ComparisonData("t", "accuracy", {"run": [metrics]})], tmp_path / "c.png", "t")
    smooth = saved_figures[0].axes[0].lines[1]
    np.testing.assert_allclose(smooth.get_ydata(), moving_average(values, 10))
    (compared,) = saved_figures[1].axes[0].lines
    np.testing.assert_allclose(compared.get_ydata(), moving_average(values, 5))


def test_an_accuracys_axis_ends_at_all_and_at_none(tmp_path, saved_figures):
    metrics = [{"iteration": i, "train_accuracy": float(i > 1)} for i in (1, 2)]
    plot_learning_curves(metrics, tmp_path / "curves.png", "t", test=(1.0, 0.5))
    assert saved_figures[0].axes[0].get_ylim() == (-0.02, 1.02)


def test_more_runs_than_colors_differ_in_their_lines(tmp_path, saved_figures):
    runs = {str(n): [[{"iteration": 1, "validation_mse": 1.0}]] for n in range(9)}
    plot_comparison([ComparisonData("t", "mse", runs)], tmp_path / "curves.png", "t")
    lines = saved_figures[0].axes[0].lines
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == 9
    assert lines[8].get_color() == lines[0].get_color()


def test_own_metrics_have_panels_of_their_own(tmp_path):
    metrics = [{"iteration": i, "train_loss": 2.0 / i, "train_accuracy": 0.5} for i in range(1, 50)]
    path = plot_learning_curves(metrics, tmp_path / "curves.png", "title")
    two = Image.open(path).size
    metrics += [{"iteration": 20, "validation_ci95": 0.1, "validation_entropy": 0.5}]
    three = Image.open(plot_learning_curves(metrics, path, "title")).size
    assert (three[0] / two[0], three[1]) == (pytest.approx(1.5, abs=0.01), two[1])
    metrics += [{"iteration": 20, "train_confidence": 0.5}]
    four = Image.open(plot_learning_curves(metrics, path, "title")).size
    assert (four[0], four[1] / three[1]) == (three[0], pytest.approx(2, abs=0.01))


def test_missing_folder_is_a_user_error(tmp_path):
    metrics = [{"iteration": 1, "train_loss": 1.0}]
    with pytest.raises(
        UserError, match=r"curves\.png \(No such file.*, or choose another directory\.$"
    ):
        plot_learning_curves(metrics, tmp_path / "no" / "curves.png", "t")


def test_comparison_shows_every_run_and_seeds_in_one_color(tmp_path, saved_figures):
    seeds = [run_metrics("accuracy", 0.1), run_metrics("accuracy", 0.2)]
    training = [each for each in run_metrics("mse", 0) if "train_mse" in each]
    runs = {"one": seeds, "two": [run_metrics("accuracy", 0.3)]}
    panels = [
        ComparisonData("a $task$", "accuracy", runs),
        ComparisonData("another", "mse", {"three": [training], "four": [[]]}),
    ]
    path = plot_comparison(panels, tmp_path / "curves.png", "Two panels")
    assert Image.open(path).size[0] > 1000
    (figure,) = saved_figures
    one, again, two = figure.axes[0].lines
    three, four = figure.axes[1].lines
    assert list(one.get_xdata()) == list(range(10, 100, 10))
    assert list(one.get_ydata()) == pytest.approx([0.1 + i / 200 for i in range(10, 100, 10)])
    assert one.get_color() == again.get_color() != two.get_color()
    labels = [[text.get_text() for text in axes.get_legend().texts] for axes in figure.axes]
    assert labels == [["one", "two"], ["three, training", "four, no metrics"]]
    assert len(three.get_xdata()) == 99 and len(four.get_xdata()) == 0
    ticks = [axes.yaxis.get_major_formatter()(0.5, 0) for axes in figure.axes]
    assert ticks == ["50%", "0.5"]
    assert [axes.get_yscale() for axes in figure.axes] == ["linear", "log"]


def test_non_finite_values_are_left_out_of_the_moving_average(tmp_path, saved_figures):
    values = np.array([1.0, 2.0, np.nan, 4.0, 5.0])
    np.testing.assert_allclose(moving_average(values, 3), [1.5, 1.5, 3.0, 4.5, 4.5])
    alone = moving_average(np.array([np.nan, np.nan, 1.0, np.nan, np.nan]), 3)
    np.testing.assert_allclose(alone, [np.nan, 1.0, 1.0, 1.0, np.nan])
    assert moving_average(np.ones(3), 5).tolist() == [1.0, 1.0, 1.0]
    training = [{"iteration": i, "train_mse": np.nan if i == 60 else 1.0} for i in range(1, 151)]
    panel = ComparisonData("title", "mse", {"run": [training]})
    plot_comparison([panel], tmp_path / "curves.png", "title")
    (line,) = saved_figures[0].axes[0].lines
    assert len(line.get_xdata()) == 150 and np.allclose(line.get_ydata(), 1.0)


@pytest.mark.parametrize(("length", "scale"), [(900, "linear"), (1000, "log")])
def test_runs_of_very_different_lengths_are_legible(tmp_path, saved_figures, length, scale):
    short = [{"iteration": i, "validation_accuracy": 0.5} for i in range(10, 101, 10)]
    long = [{"iteration": i, "validation_accuracy": 0.9} for i in range(50, length + 1, 50)]
    panel = ComparisonData("title", "accuracy", {"ANIL": [short], "MAML": [long]})
    plot_comparison([panel], tmp_path / "curves.png", "title")
    assert saved_figures[0].axes[0].get_xscale() == scale
