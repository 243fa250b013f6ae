"""A sweep's picture: which kind fits, and that each can be drawn."""

import pytest

from metadist.plots import SweepPoint, sweep_picture
from metadist.plots import sweep as module


def points(*settings: tuple[str, ...]) -> list[SweepPoint]:
    return [
        SweepPoint(values, 0.5 + 0.01 * place, 0.02 if place else None, place == 1)
        for place, values in enumerate(settings)
    ]


GRID = points(*((rate, way) for rate in ("0.1", "0.4") for way in ("dim0", "batch")))
LINES = points(*((rate, way) for rate in ("0.01", "0.1", "1") for way in ("dim0", "batch")))
SEARCH = points(*((f"0.{n}", f"0.0{9 - n}") for n in range(1, 7)))


@pytest.mark.parametrize(
    ("settings", "keys", "kind"),
    [
        (GRID, ("rate", "partition"), "_heat_map"),
        (LINES, ("rate", "partition"), "_lines"),
        (points(("1",), ("2",), ("3",)), ("rate",), "_lines"),
        (SEARCH, ("rate", "decay"), "_rows"),
        (points(("maml",), ("anil",)), ("algorithm",), "_rows"),
        (points(()), (), "_rows"),
    ],
)
@pytest.mark.parametrize("metric", ["accuracy", "mse"])
def test_the_kind_that_fits_is_drawn(tmp_path, monkeypatch, settings, keys, kind, metric):
    drawn = []
    for name in ("_heat_map", "_lines", "_rows"):
        real = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *a, name=name, real=real: (drawn.append(name), real(*a))
        )
    path = sweep_picture(settings, keys, metric, tmp_path / "sweep.png", "three seeds")
    assert drawn == [kind] and path.read_bytes().startswith(b"\x89PNG")


def test_the_chosen_one_is_drawn_however_many_did_better_in_the_test(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(module, "_rows", lambda axes, shown, *rest: drawn.extend(shown))
    many = points(*((f"w{n}", f"v{n}") for n in range(40)))  # the second worst is the chosen one
    sweep_picture(many, ("a", "b"), "accuracy", tmp_path / "sweep.png", "three seeds")
    assert len(drawn) == 31 and drawn[-1].best
