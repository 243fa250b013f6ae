"""Jobs that a launcher starts: at the same time, or waited for by the sweeper."""

import contextlib
import io
import json
import pickle
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from tiny import compose
from worlds import run_world

from metadist.cli.sweeps import (
    SweepCallback,
    fail_job,
    finish_sweep,
    launch_job,
    objective_value,
    sweep_jobs,
)
from metadist.errors import UserError
from metadist.launchers import Launcher, RunSpec
from metadist.launchers.error_reporting import WorkerGroupFailed
from metadist.launchers.job import JobFailure, report_errors
from metadist.launchers.run_spec import save_configuration
from metadist.reports import WORKER_ERROR_FILE, read_failure, write_results
from metadist.training import Interrupted


class Writer(Launcher):
    """Its jobs write results and count how many run at the same time."""

    running = most = 0
    lock = threading.Lock()
    barrier: threading.Barrier | None = None

    def check(self, configuration):
        pass

    def run(self, spec):
        with Writer.lock:
            Writer.running += 1
            Writer.most = max(Writer.most, Writer.running)
        if Writer.barrier is not None:  # each job waits until another one runs
            Writer.barrier.wait(50)
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


GLYPHS = {"_target_": "metadist.tasks.Glyphs"}


def start_sweep(directory: Path, sweeper: str, direction: str = "maximize", **values) -> None:
    nodes = {
        "sweeper": {
            "_target_": f"x.{sweeper}",
            "direction": direction,
            "params": values.pop("params", None),
        },
        "launcher": {"_target_": "x.BasicLauncher"},
        "sweep": {"dir": str(directory)},
        "overrides": {"task": values.pop("overrides", []), "hydra": values.pop("of_hydra", [])},
    }
    SweepCallback().on_multirun_start(
        OmegaConf.create({"hydra": nodes, "dataset": GLYPHS, **values})
    )


def launched(directory: Path, sweeper: str) -> tuple:
    start_sweep(directory, sweeper)
    if sweeper == "BasicSweeper":
        Writer.barrier = threading.Barrier(2)
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


class Looking(Writer):
    """Notes what its jobs find when they start."""

    def __init__(self) -> None:
        self.found: list[tuple[bool, bool]] = []

    def run(self, spec):
        self.found.append((spec.concurrent, (spec.directory / WORKER_ERROR_FILE).exists()))
        return super().run(spec)


def found_by_jobs(directory: Path) -> list[tuple[bool, bool]]:
    launcher = Looking()
    for sweeper, max_concurrent in (("BasicSweeper", 2), ("BasicSweeper", 1), ("Optuna", 2)):
        folder = directory / f"{sweeper} {max_concurrent}"
        folder.mkdir()
        start_sweep(folder, sweeper)
        spec = spec_of(folder)
        (spec.directory / WORKER_ERROR_FILE).write_text("of an earlier attempt")
        with sweep_jobs():
            launch_job(launcher, max_concurrent, spec)
    return launcher.found


def test_a_job_knows_whether_others_run_beside_it_and_finds_no_old_error(tmp_path):
    (found,) = run_world(found_by_jobs, 1, tmp_path)
    assert found == [(True, False), (False, False), (False, False)]


def launched_to_find_the_worst(directory: Path, dataset: dict | None) -> str:
    overrides = ["dataset=glyphs,sinusoid"] if dataset else []
    start_sweep(directory, "OptunaSweeper", "minimize", overrides=overrides, dataset=dataset)
    try:
        launch_job(Writer(), 1, spec_of(directory))
    except JobFailure as failure:
        return str(failure.error)
    return ""


@pytest.mark.parametrize("dataset", [GLYPHS, None], ids=["over datasets", "without one"])
def test_a_sweeper_that_would_find_the_worst_is_refused(tmp_path, dataset):
    (message,) = run_world(launched_to_find_the_worst, 1, tmp_path, dataset)
    assert "would look for the worst validation accuracy" in message


def launched_again(directory: Path) -> tuple:
    """What comes of a job that has finished before, in a sweep and outside of one."""
    start_sweep(directory, "OptunaSweeper")
    found = []
    for in_sweep in (True, False):
        spec = spec_of(directory, int(in_sweep), in_sweep)
        save_configuration(spec)
        (spec.directory / "results.json").write_text('{"validation_accuracy": 0.75}')
        launcher = Looking()
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            value = launch_job(launcher, 1, spec)
        found.append((value, len(launcher.found), printed.getvalue()))
    return tuple(found)


def test_a_job_of_a_sweep_that_has_finished_is_not_started_again(tmp_path):
    printed = "job 1 had finished before: validation accuracy 0.75"
    ((in_sweep, alone),) = run_world(launched_again, 1, tmp_path)
    assert in_sweep[:2] == (0.75, 0) and in_sweep[2].startswith(printed)
    assert alone == (0.0, 1, "")


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


@pytest.mark.parametrize("override", ["hydra.run.dir=a", "++hydra.run.dir=a"])
def test_the_directory_of_a_single_run_is_refused_before_any_job(tmp_path, override):
    with pytest.raises(JobFailure) as failure:
        start_sweep(tmp_path, "BasicSweeper", of_hydra=["hydra.mode=MULTIRUN", override])
    assert isinstance(failure.value.error, UserError) and str(failure.value) == (
        "hydra.run.dir has no effect in a sweep: give hydra.sweep.dir=DIR, whose jobs are DIR/0, "
        "DIR/1, …."
    )


@pytest.mark.parametrize("key", ["dataset", "dataset._target_"])
@pytest.mark.parametrize("by_params", [True, False])
def test_the_direction_is_not_known_before_the_dataset_that_is_swept_over(tmp_path, key, by_params):
    values = {"overrides": [] if by_params else [f"{key}=a,b"]}
    params = {key: "choice(a,b)"} if by_params else None
    start_sweep(tmp_path, "OptunaSweeper", "minimize", params=params, **values)


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


def objective_values(directory: Path) -> dict:
    """What each direction makes of some results: the value, or why it is refused."""
    results = {
        "accuracy": {"validation_accuracy": 0.25, "test_accuracy": 0.75, "test_loss": 1.0},
        "mse": {"validation_mse": 4.0, "test_mse": 2.0},
        "both": {"validation_accuracy": 0.5, "validation_mse": 4.0},
        "test only": {"test_accuracy": 0.75, "test_mse": 2.0},
        "none": {},
    }
    found = {}
    for direction in ("maximize", "minimize", ""):
        # Over datasets of both kinds: only the results say which direction is right.
        start_sweep(directory, "OptunaSweeper", direction, overrides=["dataset=glyphs,sinusoid"])
        for name, each in results.items():
            try:
                found[name, direction] = objective_value(each)
            except UserError as error:
                found[name, direction] = str(error)
    return found


def test_a_sweeper_optimizes_the_validation_metric_in_the_right_direction(tmp_path):
    (found,) = run_world(objective_values, 1, tmp_path)
    for name, value, right, wrong in (
        ("accuracy", 0.25, "maximize", "minimize"),
        ("mse", 4.0, "minimize", "maximize"),
        ("both", 0.5, "maximize", "minimize"),
    ):
        assert found[name, right] == found[name, ""] == value
        assert f"write hydra.sweeper.direction={right}" in found[name, wrong]
        metric = "mse" if name == "mse" else "accuracy"
        assert f"{wrong} would look for the worst validation {metric}" in found[name, wrong]
    for name in ("test only", "none"):
        assert {found[name, each] for each in ("maximize", "minimize", "")} == {None}


def no_sweep_here(directory: Path, status: int, on_failure: str, finished: bool = False) -> dict:
    """What becomes of a job that failed in a process of joblib or submitit."""
    configuration = compose(f"sweep.on_failure={on_failure}")
    spec = replace(spec_of(directory, 4), configuration=configuration, overrides=("seed=4",))
    if finished:
        write_results(spec.directory, {"seed": 3})
    ending: Exception = UserError("too many ways") if status == 2 else LookupError("on purpose")
    raised = ""
    with report_errors() as exit_status:
        try:
            fail_job(spec, JobFailure(ending, in_job=True))
        except BaseException as error:
            raised = f"{type(error).__name__}: {error}"
            raise pickle.loads(pickle.dumps(error)) from None
    return {"raised": raised, "status": exit_status.value, "failure": read_failure(spec.directory)}


@pytest.mark.parametrize(
    ("status", "message"), [(2, "too many ways"), (1, "LookupError: on purpose")]
)
def test_a_job_that_fails_in_a_process_of_hydras_launcher_has_its_exit_status(
    tmp_path, status, message
):
    (found,) = run_world(no_sweep_here, 1, tmp_path, status, "stop")
    assert found["raised"] == f"SweepJobFailed: job 4: {message}" and found["status"] == status
    failure = found["failure"]
    assert (failure["error"], failure["exit_status"]) == (message, status)
    assert failure["overrides"] == ["seed=4"]


def test_a_sweep_that_continues_only_records_the_failure(tmp_path):
    (found,) = run_world(no_sweep_here, 1, tmp_path, 1, "continue")
    assert found["raised"] == "" and found["status"] == 0
    assert found["failure"]["exit_status"] == 1


def test_a_failure_that_is_not_recorded_beside_results_is_raised(tmp_path):
    (found,) = run_world(no_sweep_here, 1, tmp_path, 2, "continue", True)
    assert found["raised"] == "SweepJobFailed: job 4: too many ways" and found["status"] == 2
    assert found["failure"] is None


def failed_group(
    directory: Path, status: int, on_failure: str, in_sweep: bool, worker_error: str = ""
) -> tuple:
    start_sweep(directory, "BasicSweeper")
    configuration = compose(f"sweep.on_failure={on_failure}")
    spec = replace(spec_of(directory, 1, in_sweep), configuration=configuration)
    if worker_error:
        (spec.directory / WORKER_ERROR_FILE).write_text(worker_error)
    try:
        error = WorkerGroupFailed(status) if status > 0 else Interrupted(-status, "stopped")
        fail_job(spec, JobFailure(error, in_job=False))
    except JobFailure as failure:
        return failure.error.exit_status, read_failure(spec.directory)
    return "goes on", read_failure(spec.directory)


@pytest.mark.parametrize(("status", "on_failure"), [(130, "stop"), (143, "continue")])
def test_a_job_that_a_signal_stopped_has_not_failed_and_ends_the_sweep(
    tmp_path, status, on_failure
):
    for number, given in enumerate((status, 128 - status)):  # a launched job's, this process's
        directory = tmp_path / str(number)
        directory.mkdir()
        assert run_world(failed_group, 1, directory, given, on_failure, True) == [(status, None)]


@pytest.mark.parametrize(("on_failure", "ending"), [("stop", 1), ("continue", "goes on")])
def test_a_job_that_failed_is_recorded(tmp_path, on_failure, ending):
    (found,) = run_world(failed_group, 1, tmp_path, 1, on_failure, True)
    assert found[0] == ending
    assert found[1]["error"] == "its processes ended with status 1"


def test_a_job_outside_of_a_sweep_leaves_no_record(tmp_path):
    assert run_world(failed_group, 1, tmp_path, 1, "continue", False) == [(1, None)]


def ended(directory: Path, failing: int, status: int) -> tuple[int, str, str]:
    """The exit status of a sweep of three jobs, and what it printed."""
    start_sweep(directory, "BasicSweeper")
    configuration = compose("sweep.on_failure=continue")
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        with sweep_jobs():
            for number in range(3):
                spec = replace(spec_of(directory, number), configuration=configuration)
                save_configuration(spec)
                if number < failing:
                    fail_job(spec, JobFailure(UserError("too many ways"), in_job=False))
                else:
                    launch_job(Writer(), 1, spec)
        status = finish_sweep(status)
    return status, out.getvalue(), err.getvalue()


@pytest.mark.parametrize(
    ("failing", "status", "expected", "message"),
    [
        (1, 0, 1, "error: 1 job of the sweep failed (0): sweep.md says why; the same command with"),
        (0, 143, 143, "the sweep was stopped: to resume, give the same command with hydra.sweep"),
        (1, 2, 2, ""),
    ],
)
def test_the_end_of_a_sweep(tmp_path, failing, status, expected, message):
    ((found, out, err),) = run_world(ended, 1, tmp_path, failing, status)
    assert found == expected
    assert err.count("of the sweep failed (") == bool(message and failing)
    assert message in err and ("was stopped" in err) == (status == 143)
    for number in range(3):
        line = f"job {number} finished: validation accuracy {number / 10:.4g}"
        assert (line in out.splitlines()) == (number >= failing)
    assert (tmp_path / "sweep.md").exists()


def test_the_error_of_the_workers_is_recorded(tmp_path):
    error = "LookupError: on purpose"
    (found,) = run_world(failed_group, 1, tmp_path, 1, "continue", True, error)
    assert found[1]["error"] == error
