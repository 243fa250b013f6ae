"""Interactive figures of a sweep: their data, their order and when there are none."""

import math

import pytest

from metadist.plots import (
    SettingData,
    compared_curves,
    heat_map,
    parallel_coordinates,
    settings_with_intervals,
)
from metadist.plots.run_figures import MAX_POINTS


def settings(*rows: tuple[tuple[str, ...], float]) -> list[SettingData]:
    return [SettingData(values, mean, None, False) for values, mean in rows]


GRID = settings(
    (("a", "10", "x"), 0.5),
    (("a", "9", "x"), 0.25),
    (("b", "10", "x"), 0.75),
    (("b", "10", "y"), 0.25),
)


@pytest.mark.parametrize("metric", ["accuracy", "mse"])
def test_a_heat_map_is_averaged_over_the_other_keys(metric):
    figure = heat_map(GRID, ("way", "shots", "model"), metric)
    (trace,) = figure["data"]
    assert (trace["x"], trace["y"]) == (["a", "b"], ["9", "10"])
    assert trace["z"] == [[0.25, None], [0.5, 0.5]]
    titles = [figure["layout"][name]["title"]["text"] for name in ("xaxis", "yaxis")]
    assert titles == ["way", "shots"] and trace["reversescale"] == (metric == "mse")


def test_a_heat_map_is_by_the_keys_with_most_values():
    rows = [((w, s, r), 0.5) for w in "ab" for s in "123" for r in "4567"]
    layout = heat_map(settings(*rows), ("way", "shots", "rate"), "mse")["layout"]
    titles = [layout[name]["title"]["text"] for name in ("xaxis", "yaxis")]
    assert titles == ["rate", "shots"]


def test_a_heat_map_needs_two_keys_and_half_of_its_cells():
    assert heat_map(settings((("a", "1"), 0.5), (("b", "1"), 0.5)), ("k", "l"), "mse") is None
    diagonal = settings(*(((str(n), str(n)), 0.5) for n in range(2)))
    assert heat_map(diagonal, ("k", "l"), "mse") is not None
    diagonal = settings(*(((str(n), str(n)), 0.5) for n in range(3)))
    assert heat_map(diagonal, ("k", "l"), "mse") is None


def test_parallel_coordinates_span_the_finite_means():
    rows = settings((("1e-3",), 0.5), (("1e-2",), math.nan), (("1e-4",), 0.75))
    (trace,) = parallel_coordinates(rows, ("rate",), "mse")["data"]
    rate, metric = trace["dimensions"]
    assert (rate["ticktext"], rate["values"]) == (["1e-4", "1e-3", "1e-2"], [1, 2, 0])
    assert metric["values"] == trace["line"]["color"] == [0.5, None, 0.75]
    assert (trace["line"]["cmin"], trace["line"]["cmax"]) == (0.5, 0.75)
    assert trace["line"]["reversescale"] is True
    (same,) = parallel_coordinates(rows[:1], ("rate",), "accuracy")["data"]
    assert same["line"]["cmin"] < same["line"]["cmax"] and not same["line"]["reversescale"]


@pytest.mark.parametrize(("metric", "order"), [("accuracy", ["b", "a"]), ("mse", ["a", "b"])])
def test_the_best_setting_is_above(metric, order):
    rows = [
        SettingData(("a",), 0.5, None, False, {"run 0": 0.5}),
        SettingData(("b",), 0.75, 0.25, True, {"run 1": 0.5, "run 2": 1.0}),
    ]
    figure = settings_with_intervals(rows, ["a", "b"], metric)
    means, seeds = figure["data"]
    assert means["y"] == order and figure["layout"]["yaxis"]["autorange"] == "reversed"
    found = dict(zip(means["y"], means["error_x"]["array"], strict=True))
    assert found == {"a": 0.0, "b": 0.25}
    assert {*zip(seeds["y"], seeds["x"], seeds["text"], strict=True)} == {
        ("a", 0.5, "run 0"),
        ("b", 0.5, "run 1"),
        ("b", 1.0, "run 2"),
    }
    best, other = (means["marker"]["color"][order.index(name)] for name in "ba")
    assert best != other


@pytest.mark.parametrize(("metric", "order"), [("accuracy", "acb"), ("mse", "cab")])
def test_a_setting_without_a_mean_is_below(metric, order):
    rows = settings((("a",), 0.75), (("b",), math.nan), (("c",), 0.5))
    means, _ = settings_with_intervals(rows, ["a", "b", "c"], metric)["data"]
    assert means["y"] == list(order)


def test_runs_without_validation_are_shown_by_their_smoothed_training():
    validation = [{"iteration": i, "validation_mse": 1.0 / i} for i in (10, 20)]
    training = [{"iteration": i, "train_mse": float(i % 2)} for i in range(1, 151)]
    runs = {"0": validation, "1": validation, "2": training, "3": []}
    runs["4"] = [{"iteration": i, "train_mse": math.nan} for i in range(1, 2 * MAX_POINTS)]
    groups = {"0": "a", "1": "a", "2": "b", "3": "c", "4": "d"}
    data = compared_curves(runs, "mse", groups)["data"]
    assert [trace["name"] for trace in data] == ["a", "a", "b, training"]
    assert [trace["showlegend"] for trace in data] == [True, False, True]
    assert data[0]["line"]["color"] == data[1]["line"]["color"] != data[2]["line"]["color"]
    assert (data[0]["x"], data[0]["y"]) == ([10, 20], [0.1, 0.05])
    middle = data[2]["y"][10:-10]  # a mean of three iterations, of which every second is 1
    assert {round(value, 6) for value in middle} == {0.333333, 0.666667}


@pytest.mark.parametrize(("length", "kind"), [(90, None), (100, "log")])
def test_runs_ten_times_as_long_have_a_logarithmic_axis(length, kind):
    runs = {
        str(end): [{"iteration": i, "validation_mse": 1.0} for i in (5, end)]
        for end in (10, length)
    }
    figure = compared_curves(runs, "mse", dict.fromkeys(runs, "a"))
    assert figure["layout"]["xaxis"].get("type") == kind


@pytest.mark.parametrize(("columns", "shown"), [(10, True), (11, False)])
def test_cells_have_their_numbers_where_there_is_room(columns, shown):
    rows = [((w, str(n)), 0.5) for w in "ab" for n in range(columns)]
    for metric, number in (("accuracy", "%{z:.1%}"), ("mse", "%{z:.3g}")):
        (trace,) = heat_map(settings(*rows), ("way", "shots"), metric)["data"]
        assert trace.get("texttemplate") == (number if shown else None)


@pytest.mark.parametrize(("rows", "fits"), [(20, True), (21, False)])
def test_a_heat_map_has_at_most_400_cells(rows, fits):
    cells = [((str(m), str(n)), 0.5) for m in range(20) for n in range(rows)]
    assert (heat_map(settings(*cells), ("k", "l"), "mse") is not None) == fits


@pytest.mark.parametrize(
    ("key", "value", "margin"), [(1, 3, 60), (1, 12, 84), (26, 3, 78), (1, 99, 240)]
)
def test_the_labels_of_the_first_axis_fit_into_the_margin(key, value, margin):
    rows = settings((("a" * value, "b" * 50), 0.5), (("a", "b"), 0.75))
    layout = parallel_coordinates(rows, ("k" * key, "l"), "mse")["layout"]
    assert layout["margin"] == {"l": margin, "r": 60, "t": 60, "b": 20}


def test_accuracies_of_parallel_coordinates_are_percentages():
    rows = settings((("1",), 0.5), (("2",), 0.75))
    for metric, number in (("accuracy", ".1%"), ("mse", None)):
        (trace,) = parallel_coordinates(rows, ("k",), metric)["data"]
        assert trace["dimensions"][-1].get("tickformat") == number
