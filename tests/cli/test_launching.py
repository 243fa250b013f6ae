"""Jobs that a launcher starts: at the same time, or waited for by the sweeper."""

import json
import threading
import time
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from worlds import run_world

from metadist.cli.sweeps import SweepCallback, launch_job, sweep_jobs
from metadist.errors import UserError
from metadist.launchers import Launcher, RunSpec
from metadist.launchers.job import JobFailure


class Writer(Launcher):
    """Its jobs write results, after a while, and count how many run at the same time."""

    running = most = 0
    lock = threading.Lock()

    def check(self, configuration):
        pass

    def run(self, spec):
        with Writer.lock:
            Writer.running += 1
            Writer.most = max(Writer.most, Writer.running)
        time.sleep(0.3)
        with Writer.lock:
            Writer.running -= 1
        results = {"validation_accuracy": spec.number / 10}
        (spec.directory / "results.json").write_text(json.dumps(results))
        return 0

    def stop(self, number):
        pass


class Broken(Writer):
    def run(self, spec):
        raise OSError("no space left on the disk")


def spec_of(directory: Path, number: int = 0, in_sweep: bool = True) -> RunSpec:
    directory = directory / str(number)
    directory.mkdir()
    return RunSpec("a", directory, OmegaConf.create(), in_sweep=in_sweep, number=number)


def start_sweep(directory: Path, sweeper: str, direction: str = "maximize", **values) -> None:
    nodes = {
        "sweeper": {"_target_": f"x.{sweeper}", "direction": direction},
        "launcher": {"_target_": "x.BasicLauncher"},
        "sweep": {"dir": str(directory)},
        "overrides": {"task": values.pop("overrides", [])},
    }
    dataset = {"_target_": "metadist.tasks.Glyphs"}
    SweepCallback().on_multirun_start(
        OmegaConf.create({"hydra": nodes, "dataset": dataset, **values})
    )


def launched(directory: Path, sweeper: str) -> tuple:
    start_sweep(directory, sweeper)
    with sweep_jobs():
        values = [launch_job(Writer(), 2, spec_of(directory, number)) for number in range(4)]
    finished = sorted(path.parent.name for path in directory.glob("*/results.json"))
    return values, Writer.most, finished


@pytest.mark.parametrize(
    ("sweeper", "values", "most"),
    [("BasicSweeper", [None] * 4, 2), ("OptunaSweeper", [0.0, 0.1, 0.2, 0.3], 1)],
)
def test_a_sweeper_that_optimizes_waits_for_each_job(tmp_path, sweeper, values, most):
    (found,) = run_world(launched, 1, tmp_path, sweeper)
    assert found == (values, most, ["0", "1", "2", "3"])


def launched_to_find_the_worst(directory: Path) -> str:
    start_sweep(directory, "OptunaSweeper", "minimize", overrides=["dataset=glyphs,sinusoid"])
    try:
        launch_job(Writer(), 1, spec_of(directory))
    except JobFailure as failure:
        return str(failure.error)
    return ""


def test_a_sweeper_that_would_find_the_worst_is_refused(tmp_path):
    (message,) = run_world(launched_to_find_the_worst, 1, tmp_path)
    assert "would look for the worst validation accuracy" in message


SINUSOID = {"_target_": "metadist.tasks.Sinusoid"}


@pytest.mark.parametrize(
    ("values", "direction", "message"),
    [
        ({}, "minimize", "worst validation accuracy: write hydra.sweeper.direction=maximize"),
        ({"dataset": SINUSOID}, "maximize", "worst validation mse"),
    ],
)
def test_a_wrong_direction_is_refused_before_any_job(tmp_path, values, direction, message):
    with pytest.raises(JobFailure, match=message) as failure:
        start_sweep(tmp_path, "OptunaSweeper", direction, **values)
    assert isinstance(failure.value.error, UserError)
    right = {"minimize": "maximize", "maximize": "minimize"}[direction]
    start_sweep(tmp_path, "OptunaSweeper", right, **values)


def test_what_a_launcher_raises_is_the_jobs_failure(tmp_path):
    with pytest.raises(JobFailure, match="no space left on the disk") as failure:
        launch_job(Broken(), 1, spec_of(tmp_path, in_sweep=False))
    assert isinstance(failure.value.error, OSError)


def test_a_job_without_results_is_a_user_error(tmp_path):
    class Silent(Writer):
        def run(self, spec):
            return 0

    with pytest.raises(JobFailure, match="left no results") as failure:
        launch_job(Silent(), 1, spec_of(tmp_path, in_sweep=False))
    assert isinstance(failure.value.error, UserError)
