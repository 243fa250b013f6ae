"""Plots of sweeps: which kind is chosen, and what each shows."""

import itertools

import pytest

from metadist.plots import SweepData, plot_sweep


def points(*settings: tuple[str, ...]) -> list[SweepData]:
    return [
        SweepData(values, 0.5 + 0.01 * index, 0.02 if index else None, index == 1)
        for index, values in enumerate(settings)
    ]


def kind_of(axes) -> str:
    if axes.images:
        return "heat map"
    return "lines" if axes.get_ylabel().startswith("test ") else "rows"


GRID = points(*((rate, way) for rate in ("0.1", "0.4") for way in ("dim0", "batch")))
LINES = points(*((rate, way) for rate in ("0.01", "0.1", "1") for way in ("dim0", "batch")))
SEARCH = points(*((f"0.{n}", f"0.0{9 - n}") for n in range(1, 7)))


@pytest.mark.parametrize(
    ("settings", "keys", "kind"),
    [
        (GRID, ("rate", "partition"), "heat map"),
        (LINES, ("rate", "partition"), "lines"),
        (points(("1",), ("2",), ("3",)), ("rate",), "lines"),
        (SEARCH, ("rate", "decay"), "rows"),
        (points(("maml",), ("anil",)), ("algorithm",), "rows"),
        (points(()), (), "rows"),
    ],
)
@pytest.mark.parametrize("metric", ["accuracy", "mse"])
def test_the_kind_fits_the_keys(tmp_path, saved_figures, settings, keys, kind, metric):
    path = plot_sweep(settings, keys, metric, tmp_path / "sweep.png", "three seeds")
    assert path.read_bytes().startswith(b"\x89PNG")
    (figure,) = saved_figures
    axes = figure.axes[0]
    assert kind_of(axes) == kind
    if kind == "heat map":
        assert len(axes.texts) == len(settings)
    elif kind == "lines":
        assert sum(len(line.lines[0].get_xdata()) for line in axes.containers) == len(settings)
    else:
        assert len(axes.get_yticklabels()) == len(axes.containers) == len(settings)


def test_the_selected_setting_is_shown_however_many_have_a_better_test(tmp_path, saved_figures):
    many = points(*((f"w{n}", f"v{n}") for n in range(40)))  # the second worst is selected
    plot_sweep(many, ("a", "b"), "accuracy", tmp_path / "sweep.png", "three seeds")
    labels = [label.get_text() for label in saved_figures[0].axes[0].get_yticklabels()]
    assert len(labels) == 31 and labels[-1] == "a=w1  b=v1"


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
    assert kind_of(saved_figures[0].axes[0]) in ("rows", "heat map")
