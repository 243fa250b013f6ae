"""Plots of sweeps: which kind is chosen, and what each shows."""

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
