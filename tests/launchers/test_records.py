"""What a run's directory says of the run."""

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from metadist.errors import UserError
from metadist.launchers.launcher import PlannedRun
from metadist.launchers.records import finished_results, write_record
from metadist.reports import write_failure


def planned(directory: Path, iterations: int = 10, root: str = "here") -> PlannedRun:
    configuration = OmegaConf.create(
        {"seed": 0, "dataset": {"root": root}, "trainer": {"iterations": iterations}}
    )
    return PlannedRun(Path("a.py"), "a", directory, configuration, ("seed=0",), (), None)


def finish(directory: Path) -> None:
    (directory / "results.json").write_text(json.dumps({"test_accuracy": 0.5}))


def test_results_are_of_the_run_whose_configuration_lies_beside_them(tmp_path):
    assert finished_results(planned(tmp_path)) is None
    write_record(planned(tmp_path))
    assert finished_results(planned(tmp_path)) is None
    finish(tmp_path)
    assert finished_results(planned(tmp_path)) == {"test_accuracy": 0.5}
    assert finished_results(planned(tmp_path, root="there")) == {"test_accuracy": 0.5}
    assert finished_results(planned(tmp_path, 20)) is None


def test_a_run_that_is_extended_has_no_results_until_it_ends(tmp_path):
    write_record(planned(tmp_path))
    finish(tmp_path)
    write_record(planned(tmp_path, 20))  # and now it is killed
    assert finished_results(planned(tmp_path, 20)) is None
    assert not (tmp_path / "results.json").exists()


def test_a_refused_start_does_not_spoil_a_finished_run(tmp_path):
    write_record(planned(tmp_path))
    finish(tmp_path)
    write_failure(tmp_path, ["seed=0"], "too many workers", 2)
    assert (tmp_path / "failure.json").exists()
    assert finished_results(planned(tmp_path)) == {"test_accuracy": 0.5}
    assert not (tmp_path / "failure.json").exists()


def test_results_that_cannot_be_read_are_named(tmp_path):
    (tmp_path / "results.json").write_text("{")
    with pytest.raises(UserError, match=r"results\.json cannot be read"):
        finished_results(planned(tmp_path))
