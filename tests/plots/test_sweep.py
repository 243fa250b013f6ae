"""Plots of sweeps: which kind is chosen, and what each shows."""

import itertools
import math

import pytest

from metadist.plots import SettingData, plot_sweep


def points(*settings: tuple[str, ...]) -> list[SettingData]:
    return [
        SettingData(values, 0.5 + 0.01 * index, 0.02 if index else None, index == 1)
        for index, values in enumerate(settings)
    ]


def kind_of(axes) -> str:
    return "lines" if axes.get_ylabel().startswith("test ") else "rows"


GRID = points(*((rate, way) for rate in ("0.1", "0.4") for way in ("dim0", "batch")))
LINES = points(*((rate, way) for rate in ("0.01", "0.1", "1") for way in ("dim0", "batch")))
SEARCH = points(*((f"0.{n}", f"0.0{9 - n}") for n in range(1, 7)))


@pytest.mark.parametrize(
    ("settings", "keys", "kind"),
    [
        (GRID, ("rate", "partition"), "rows"),
        (LINES, ("rate", "partition"), "lines"),
        (points(("1",), ("2",), ("3",)), ("rate",), "lines"),
        (SEARCH, ("rate", "decay"), "rows"),
        (points(("maml",), ("anil",)), ("algorithm",), "rows"),
        (points(()), (), "rows"),
    ],
)
def test_the_kind_fits_the_keys(tmp_path, saved_figures, settings, keys, kind):
    path = plot_sweep(settings, keys, "accuracy", tmp_path / "sweep.png", "three seeds")
    assert path.read_bytes().startswith(b"\x89PNG")
    (figure,) = saved_figures
    axes = figure.axes[0]
    assert kind_of(axes) == kind
    if kind == "lines":
        assert sum(len(line.lines[0].get_xdata()) for line in axes.containers) == len(settings)
    else:
        assert len(axes.get_yticklabels()) == len(axes.containers) == len(settings)


def settings(*rows) -> list[SettingData]:
    """Settings from (values, mean, interval); the second one is the best."""
    return [SettingData(*row, index == 1) for index, row in enumerate(rows)]


def test_lines_go_through_their_settings_in_ascending_order(tmp_path, saved_figures):
    found = settings(
        (("a", "1"), 0.9, 0.25),
        (("b", "0.01"), 0.5, 0.125),
        (("b", "1"), 0.6, None),
        (("a", "0.01"), 0.7, 0.5),
        (("a", "0.1"), 0.8, 0.25),
        (("b", "0.1"), 0.4, 0.125),
    )
    plot_sweep(found, ("way", "rate"), "accuracy", tmp_path / "sweep.png", "three seeds")
    axes = saved_figures[0].axes[0]
    lines = {each.get_label(): each for each in axes.containers}
    assert list(lines) == ["way=a", "way=b"]
    for name, means, widths in (
        ("a", [0.7, 0.8, 0.9], [0.5, 0.25, 0.25]),
        ("b", [0.5, 0.4, 0.6], [0.125, 0.125, 0.0]),
    ):
        line, _, (bars,) = lines[f"way={name}"].lines
        assert list(line.get_xdata()) == [0.01, 0.1, 1.0] and list(line.get_ydata()) == means
        halves = [(high - low) / 2 for (_, low), (_, high) in bars.get_segments()]
        assert halves == pytest.approx(widths)
    (best,) = [line for line in axes.lines if line.get_label() == "best on validation"]
    assert (list(best.get_xdata()), list(best.get_ydata())) == ([0.01], [0.5])
    assert (axes.get_xscale(), axes.get_xlabel(), axes.get_title()) == (
        "log",
        "rate",
        "three seeds",
    )
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["0.01", "0.1", "1"]


def test_values_with_dollar_signs_are_shown_as_they_are(tmp_path, saved_figures):
    values = [((r"$\frac{$", rate), 0.5, 0.1) for rate in ("0.1", "0.2", "0.3")]
    plot_sweep(settings(*values), ("way", "rate"), "accuracy", tmp_path / "a.png", "one seed")
    plot_sweep(
        settings(*values, (("b", "0.1"), 0.4, 0.1)),
        ("way", "rate"),
        "mse",
        tmp_path / "b.png",
        "$ $",
    )
    labels = [text.get_text() for text in saved_figures[1].axes[0].get_legend().get_texts()]
    assert r"way=$\frac{$" in labels


@pytest.mark.parametrize(
    ("first", "last", "scale"), [("1", "9", "linear"), ("1", "10", "log"), ("0", "10", "linear")]
)
def test_values_over_a_decade_have_a_logarithmic_axis(tmp_path, saved_figures, first, last, scale):
    plot_sweep(points((first,), ("2",), (last,)), ("k",), "mse", tmp_path / "sweep.png", "one seed")
    assert saved_figures[0].axes[0].get_xscale() == scale


@pytest.mark.parametrize(("metric", "order"), [("accuracy", "bca"), ("mse", "acb")])
def test_the_best_row_comes_first(tmp_path, saved_figures, metric, order):
    means = {"a": 0.5, "b": 0.75, "c": 0.625}
    found = settings(*(((name,), mean, 0.125) for name, mean in means.items()))
    plot_sweep(found, ("algorithm",), metric, tmp_path / "sweep.png", "one seed")
    axes = saved_figures[0].axes[0]
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == [f"algorithm={name}" for name in order]
    shown = [container.lines[0] for container in axes.containers]
    assert [line.get_xdata()[0] for line in shown] == [means[name] for name in order]
    assert [line.get_ydata()[0] for line in shown] == [0, 1, 2] and axes.yaxis_inverted()
    assert [text.get_text() for text in axes.get_legend().texts] == ["best on validation"]
    assert shown[order.index("b")].get_color() != shown[order.index("a")].get_color()


@pytest.mark.parametrize(("metric", "order"), [("accuracy", "acb"), ("mse", "cab")])
def test_a_row_without_a_mean_comes_last(tmp_path, saved_figures, metric, order):
    means = {"a": 0.75, "b": math.nan, "c": 0.5}
    found = settings(*(((name,), mean, 0.125) for name, mean in means.items()))
    plot_sweep(found, ("k",), metric, tmp_path / "sweep.png", "one seed")
    labels = [label.get_text() for label in saved_figures[0].axes[0].get_yticklabels()]
    assert labels == [f"k={name}" for name in order]


def test_the_selected_setting_is_shown_however_many_have_a_better_test(tmp_path, saved_figures):
    many = points(*((f"w{n}", f"v{n}") for n in range(40)))  # the second worst is selected
    plot_sweep(many, ("a", "b"), "accuracy", tmp_path / "sweep.png", "three seeds")
    labels = [label.get_text() for label in saved_figures[0].axes[0].get_yticklabels()]
    assert len(labels) == 31 and labels[-1] == "a=w1  b=v1"
    more = saved_figures[0].axes[0].get_ylabel()
    assert more == "the best 30 of 40, and the selected one"


def test_keys_are_shortened_to_their_last_part_where_it_is_their_own(tmp_path, saved_figures):
    keys = ("algorithm.inner_lr", "optimizer.lr", "scheduler.lr")
    plot_sweep(points(("a", "b", "c")), keys, "mse", tmp_path / "sweep.png", "one seed")
    (label,) = saved_figures[0].axes[0].get_yticklabels()
    assert " ".join(label.get_text().split()) == "inner_lr=a optimizer.lr=b scheduler.lr=c"


def test_lines_are_over_the_key_with_most_values(tmp_path, saved_figures):
    runs = points(*((str(m), str(n)) for m in range(1, 4) for n in range(1, 6)))
    plot_sweep(runs, ("shots", "ways"), "mse", tmp_path / "sweep.png", "one seed")
    axes = saved_figures[0].axes[0]
    assert axes.get_xlabel() == "ways"
    names = [each.get_label() for each in axes.containers]
    assert names == ["shots=1", "shots=2", "shots=3"]


def test_names_of_runs_that_differ_in_many_keys_fit_the_figure(tmp_path, saved_figures):
    keys = ("experiment", "trainer.iterations", "trainer.eval_tasks", "trainer.meta_batch_size",
            "algorithm.inner_lr", "optimizer.lr", "dataset.within_alphabet")  # fmt: skip
    runs = points(
        *(
            (f"{name}_omniglot_20w1s_cosine", str(n), "600", "16", "0.4", "0.001", "false")
            for n, name in enumerate(("maml", "prototypical", "maml_plus_plus", "imaml"))
        )
    )
    plot_sweep(runs, keys, "accuracy", tmp_path / "sweep.png", "one seed")
    (figure,) = saved_figures
    (axes,) = figure.axes
    assert kind_of(axes) == "rows" and figure.get_suptitle() == "Test accuracy"
    assert "iterations=" in axes.get_yticklabels()[0].get_text().replace("\n", " ")
    width, height = figure.canvas.get_width_height()
    for text in (*axes.get_yticklabels(), axes.xaxis.label):
        box = text.get_window_extent()
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height
    boxes = [label.get_window_extent() for label in axes.get_yticklabels()]
    assert not any(a.overlaps(b) for a, b in itertools.pairwise(boxes))
    assert axes.get_window_extent().width > 0.4 * width


def test_lines_whose_names_do_not_fit_a_legend_are_rows(tmp_path, saved_figures):
    name = "a_very_long_name_of_a_preset_that_does_not_fit_beside_another_one"
    runs = points(*((str(n), f"{name}{m}") for n in range(3) for m in range(2)))
    plot_sweep(runs, ("shots", "experiment"), "accuracy", tmp_path / "sweep.png", "one seed")
    assert kind_of(saved_figures[0].axes[0]) == "rows"
