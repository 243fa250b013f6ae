"""Interactive figures of a run: their data and axes."""

import math

import numpy as np
import pytest

from metadist.plots import (
    confusion_matrix,
    learning_curve,
    metric_by_steps,
    regression_task,
    task_histogram,
    time_bar,
    training_curve,
)
from metadist.plots.points import moving_average
from metadist.plots.run_figures import MAX_POINTS, thin


def training(count: int, name: str = "train_accuracy") -> list[dict]:
    return [{"iteration": i, name: (i % 7) / 7} for i in range(1, count + 1)]


def test_many_iterations_are_smoothed_and_few_are_points():
    for count in (19, 20, 200):
        traces = learning_curve(training(count), "accuracy")["data"]
        assert traces[0]["y"] == [(i % 7) / 7 for i in range(1, count + 1)]
        if count == 19:
            assert [each["mode"] for each in traces] == ["lines+markers"]
            continue
        assert [each["mode"] for each in traces] == ["lines", "lines"]
        expected = moving_average(np.array(traces[0]["y"]), {20: 5, 200: 8}[count])
        assert traces[1]["y"] == pytest.approx(expected.tolist())


@pytest.mark.parametrize(("count", "ticks"), [(10, 1), (11, None)])
def test_a_short_run_has_a_tick_for_each_iteration(count, ticks):
    for figure in (
        learning_curve(training(count), "accuracy"),
        training_curve(training(count), "train_accuracy", "accuracy"),
    ):
        assert figure["layout"]["xaxis"].get("dtick") == ticks


def test_the_test_is_a_line_with_its_interval():
    layout = learning_curve([], "accuracy", (0.5, 0.25))["layout"]
    line, band = layout["shapes"]
    assert (line["y0"], line["y1"], band["y0"], band["y1"]) == (0.5, 0.5, 0.25, 0.75)
    assert layout["yaxis"]["tickformat"] == ".0%"
    layout = learning_curve([], "mse", (0.5, math.nan))["layout"]
    assert len(layout["shapes"]) == 1 and "tickformat" not in layout["yaxis"]
    assert "shapes" not in learning_curve([], "mse", (math.nan, math.nan))["layout"]


def test_validations_without_an_interval_have_no_bars():
    metrics = [{"iteration": i, "validation_mse": 1.0, "validation_ci95": 0.5} for i in (1, 2)]
    (curve,) = learning_curve(metrics, "mse", intervals=True)["data"]
    assert curve["error_y"]["array"] == [0.5, 0.5]
    del metrics[1]["validation_ci95"]
    (curve,) = learning_curve(metrics, "mse", intervals=True)["data"]
    assert "error_y" not in curve


def test_a_logarithmic_curve_leaves_out_what_has_no_logarithm():
    metrics = [{"iteration": i, "gradient_norm": value} for i, value in enumerate([1.0, 0.0, 2.0])]
    figure = training_curve(metrics, "gradient_norm", "norm", logarithmic=True)
    assert figure["data"][0]["y"] == [1.0, None, 2.0]
    assert figure["layout"]["yaxis"]["type"] == "log"
    figure = training_curve(metrics, "gradient_norm", "norm")
    assert figure["data"][0]["y"] == [1.0, 0.0, 2.0]
    assert figure["layout"]["yaxis"]["rangemode"] == "tozero"


def test_curves_are_thinned_beyond_the_limit_alone():
    for count in (MAX_POINTS, MAX_POINTS + 1):
        iterations, values = np.arange(count), np.sin(np.arange(count))
        values[5] = math.nan
        x, y = thin(iterations, values)
        assert (len(x) == count) == (count == MAX_POINTS)
        assert len(x) <= MAX_POINTS and (np.diff(x) > 0).all()
        assert (np.nanmax(y), np.nanmin(y)) == (np.nanmax(values), np.nanmin(values))


def test_accuracies_of_few_queries_have_a_bin_each():
    values = [0.2, 0.4, 0.4, 1.0, math.nan]
    figure = task_histogram(values, "accuracy")
    bins, (line,) = figure["data"][0]["xbins"], figure["layout"]["shapes"]
    assert bins == pytest.approx({"start": -0.1, "end": 1.1, "size": 0.2})
    assert line["x0"] == line["x1"] == pytest.approx(0.5)
    assert "xbins" not in task_histogram(values, "mse")["data"][0]
    many = task_histogram([i / 200 for i in range(200)], "accuracy")["data"][0]
    assert "xbins" not in many and many["nbinsx"] == 40
    for uneven in ([0.4, 0.7], [0.0, 0.4, 1.0]):  # bins would not begin between values
        assert "xbins" not in task_histogram(uneven, "accuracy")["data"][0]
    assert "shapes" not in task_histogram([math.nan], "mse")["layout"]


def test_a_confusion_matrix_has_shares_of_each_true_class():
    (trace,) = confusion_matrix(["a", "b", "c"], [[3, 1, 0], [0, 2, 0], [0, 0, 0]])["data"]
    assert trace["z"] == [[0.75, 0.25, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]
    assert trace["customdata"][0] == [3, 1, 0] and trace["hovertemplate"].startswith("true %{y}")


def test_small_parts_of_the_time_have_no_text():
    data = time_bar({"training": 96.0, "test": 4.0})["data"]
    assert [(each["name"], each["x"], each["text"]) for each in data] == [
        ("training", [96.0], ["96%"]),
        ("test", [4.0], [""]),
    ]


@pytest.mark.parametrize(("count", "listed"), [(12, True), (13, False)])
def test_few_inner_steps_have_a_tick_each(count, listed):
    rows = [{"steps": k, "mean": 0.5, "ci95": math.nan} for k in range(count)]
    figure = metric_by_steps(rows, "accuracy")
    assert ("tickvals" in figure["layout"]["xaxis"]) == listed
    assert figure["data"][0]["error_y"]["array"] == [0] * count


def test_the_intervals_of_inner_steps_are_shown():
    rows = [{"steps": k, "mean": k / 4, "ci95": k / 8} for k in range(3)]
    (trace,) = metric_by_steps(rows, "mse")["data"]
    assert (trace["x"], trace["y"]) == ([0, 1, 2], [0.0, 0.25, 0.5])
    assert trace["error_y"]["array"] == [0.0, 0.125, 0.25]


@pytest.mark.parametrize("before", [[], [7.0, math.nan]])
def test_a_regression_task_has_each_curve_and_the_points_adapted_on(before):
    figure = regression_task([[1.0, 2.0], [3.0, 4.0]], [0.0, 1.0], [5.0, 6.0], before, [8.0, 9.0])
    found = {trace["name"]: (trace["x"], trace["y"]) for trace in figure["data"]}
    expected = {"truth": ([0.0, 1.0], [5.0, 6.0]), "after adaptation": ([0.0, 1.0], [8.0, 9.0])}
    if before:
        expected["before adaptation"] = ([0.0, 1.0], [7.0, None])
    assert found == {**expected, "adapted on": ([1.0, 2.0], [3.0, 4.0])}


def test_names_are_not_read_as_tags():
    figure = confusion_matrix(["<b>", "a&b"], [[1, 0], [0, 1]])
    assert figure["data"][0]["x"] == figure["data"][0]["y"] == ["&lt;b&gt;", "a&amp;b"]
    assert figure["layout"]["yaxis"]["autorange"] == "reversed"  # the first class is above
