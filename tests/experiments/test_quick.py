"""The short runs of the reproduction: a regression test of learning."""

import re

import pytest
from commands import ROOT
from reproduction import command, quick
from reproduction.cells import load_cells
from reproduction.records import RECORDS
from reproduction.runs import Runner
from reproduction_folders import create_run

from metadist.errors import UserError

OMNIGLOT = ROOT.parent / "shared" / "data" / "omniglot"
CELL = load_cells()["maml_omniglot_5w1s"]
MSE_OF_ZERO = 4.25
"""Of predicting 0 for every sine curve: half the mean squared amplitude, in [0.1, 5]."""


def test_every_band_is_of_a_preset_and_excludes_chance():
    cells = load_cells()
    for name, band in quick.load_bands().items():
        cell = cells[name]
        assert 0 < band.low < band.high and band.iterations > 0
        if cell.metric == "accuracy":
            ways = int(re.search(r"_(\d+)w\d+s", name)[1])
            assert 1.5 / ways < band.low and band.high <= 1
        else:
            assert band.high < MSE_OF_ZERO


def test_every_recorded_preset_has_a_band():
    assert {record.name for record in RECORDS.iterdir()} <= quick.load_bands().keys()


@pytest.mark.parametrize(("accuracy", "status"), [(0.7, 0), (0.5, 1), (0.95, 1), (None, 1)])
def test_results_are_compared_with_the_band(tmp_path, monkeypatch, accuracy, status):
    def run(_, runs) -> None:
        (only,) = runs
        results = {} if accuracy is None else {"test_accuracy": accuracy}
        create_run(only.directory, only.preset, 0, *only.options, **results)

    monkeypatch.setattr(Runner, "run", run)
    lines: list[str] = []
    runner = Runner(1, 1, {}, lines.append)
    assert quick.run_quick([CELL], tmp_path, runner, lines.append) == status
    assert lines[0].startswith("maml_omniglot_5w1s: ")
    assert ("OUTSIDE" in lines[0]) == (status == 1 and accuracy is not None)


def test_cells_without_a_band_are_refused(tmp_path):
    cell = load_cells()["maml_mini_imagenet_5w1s"]
    with pytest.raises(UserError, match="none of these presets has a band"):
        quick.run_quick([cell], tmp_path, Runner(1, 1, {}, print), print)


@pytest.mark.slow
@pytest.mark.skipif(not OMNIGLOT.exists(), reason="needs the images of Omniglot")
def test_short_runs_learn_as_expected(tmp_path):
    arguments = ["--quick", "--jobs", "2", "--root", f"omniglot={OMNIGLOT}"]
    assert command.main([*arguments, "--directory", str(tmp_path)]) == 0
