"""A job's specification as text, and its files in the run's directory."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hydra.types import RunMode
from omegaconf import OmegaConf
from tiny import compose

from metadist.config.resolvers import register_resolver
from metadist.errors import UserError
from metadist.launchers.run_spec import (
    RunSpec,
    begin_run_directory,
    finished_results,
    save_configuration,
)
from metadist.reports import WORKER_ERROR_FILE, pop_worker_error


def spec_of(directory: Path, iterations: int = 10, root: str = "here") -> RunSpec:
    configuration = OmegaConf.create(
        {"seed": 0, "dataset": {"root": root}, "trainer": {"iterations": iterations}}
    )
    return RunSpec("a", directory, configuration, ("seed=0",))


def finish(directory: Path) -> None:
    (directory / "results.json").write_text(json.dumps({"test_accuracy": 0.5}))


def test_a_specification_is_the_same_after_it_was_text(monkeypatch):
    monkeypatch.setenv("A_TOKEN", "0123456789")
    configuration = compose(
        "task.ways=3", "model.dropout=1e-05", "++dataset.root=${oc.env:A_TOKEN}"
    )
    overrides = ("task.ways=3", "a='${b}: \"c\"'", "-x=é")
    spec = RunSpec("maml", Path("/a b's/1"), configuration, overrides, None, ("/x",), True, 3, True)
    text = spec.to_yaml()
    assert "0123456789" not in text  # interpolations are resolved by the process that reads it
    read = RunSpec.from_yaml(text)
    assert read == spec
    assert read.configuration.dataset.root == "0123456789"
    resolved = [OmegaConf.to_container(each.configuration, resolve=True) for each in (read, spec)]
    assert resolved[0] == resolved[1]
    with pytest.raises(Exception, match="not in struct"):
        _ = read.configuration.misspelt


def test_hydras_node_is_saved_and_is_the_same_after_it_was_text(tmp_path):
    hydra = OmegaConf.create({"hydra": {"runtime": {"cwd": "/a"}, "job": {"num": "${number}"}}})
    spec = replace(spec_of(tmp_path), hydra=hydra)
    assert RunSpec.from_yaml(spec.to_yaml()).hydra == hydra
    save_configuration(spec)
    saved = {path.name: OmegaConf.load(path) for path in (tmp_path / ".hydra").iterdir()}
    expected = {"config.yaml": spec.configuration, "overrides.yaml": ["seed=0"]}
    assert saved == {**expected, "hydra.yaml": hydra}
    (tmp_path / ".hydra" / "config.yaml").write_text("- a list")
    finish(tmp_path)
    assert finished_results(spec) is None


def test_a_copied_variable_is_redacted_in_hydras_node(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "supersecret123456")
    hydra = OmegaConf.create({"hydra": {"job": {"env_set": {"MY_API_KEY": "supersecret123456"}}}})
    save_configuration(replace(spec_of(tmp_path), hydra=hydra))
    assert "supersecret" not in (tmp_path / ".hydra" / "hydra.yaml").read_text()


def test_paths_and_enumerations_of_a_configuration_become_text():
    values = {"root": Path("/data"), "mode": RunMode.RUN, "list": [Path("a"), 1]}
    read = RunSpec.from_yaml(RunSpec("a", Path("/b"), OmegaConf.create(values)).to_yaml())
    assert read.configuration == {"root": "/data", "mode": "RUN", "list": ["a", 1]}


def test_values_of_the_environment_are_saved_as_they_were(tmp_path, monkeypatch):
    monkeypatch.setenv("WIDTH", "8")
    monkeypatch.setenv("A_TOKEN", "0123456789")
    values = {
        "model": {
            "filters": ["${oc.decode:${oc.env:WIDTH}}", "${seed}"],
            "cache": "${oc.env:NONE}",
        },
        "dataset": {"token": "${oc.env:A_TOKEN}", "half": "${fraction:0.5,${seed}}"},
        "task": {"ways": "${model.filters[1]}"},
        "logger": {"project": "${oc.env:WIDTH}"},
        "seed": 2,
    }
    configuration = OmegaConf.create(values)
    OmegaConf.set_struct(configuration, True)
    save_configuration(replace(spec_of(tmp_path), configuration=configuration))
    expected = values | {"model": values["model"] | {"filters": [8, "${seed}"]}}
    assert OmegaConf.load(tmp_path / ".hydra" / "config.yaml") == OmegaConf.create(expected)
    assert configuration == OmegaConf.create(values)


def test_a_specification_is_data(tmp_path):
    text = spec_of(tmp_path).to_yaml() + "evil: !!python/object/apply:os.getcwd []\n"
    with pytest.raises(Exception, match="could not determine a constructor"):
        RunSpec.from_yaml(text)


def test_results_belong_to_the_configuration_beside_them(tmp_path):
    assert finished_results(spec_of(tmp_path)) is None
    save_configuration(spec_of(tmp_path))
    assert finished_results(spec_of(tmp_path)) is None
    finish(tmp_path)
    assert finished_results(spec_of(tmp_path)) == {"test_accuracy": 0.5}
    assert finished_results(spec_of(tmp_path, root="there")) is None
    assert finished_results(spec_of(tmp_path, 20)) is None


@pytest.mark.parametrize("content", [None, "a: [", "a: ${nowhere}", "\xff"])
def test_results_beside_an_unreadable_configuration_are_of_another_run(tmp_path, content):
    finish(tmp_path)
    if content is not None:
        (tmp_path / ".hydra").mkdir()
        (tmp_path / ".hydra" / "config.yaml").write_text(content, encoding="latin-1")
    assert finished_results(spec_of(tmp_path)) is None


def test_a_run_that_is_extended_has_no_results_until_it_ends(tmp_path):
    begin_run_directory(spec_of(tmp_path))
    finish(tmp_path)
    renamed = ["results.json", "test_predictions.jsonl", "test_tasks.json"]
    outcome = [*renamed, "failure.json", "error.txt"]
    for name in outcome[1:]:
        (tmp_path / name).write_text("{}")
    begin_run_directory(spec_of(tmp_path, 20))  # and now it is killed
    assert finished_results(spec_of(tmp_path, 20)) is None
    assert not any((tmp_path / name).exists() for name in outcome)
    assert json.loads((tmp_path / "results.json.1").read_text()) == {"test_accuracy": 0.5}
    assert all((tmp_path / f"{name}.1").exists() for name in renamed)


def test_a_saved_configuration_is_compared_without_executing_its_interpolations(tmp_path):
    executed = []
    register_resolver("execute", executed.append, replace=True)
    save_configuration(spec_of(tmp_path))
    finish(tmp_path)
    path = tmp_path / ".hydra" / "config.yaml"
    path.write_text(path.read_text().replace("seed: 0", "seed: ${execute:1}"))
    assert finished_results(spec_of(tmp_path)) is None and not executed


def test_unreadable_results_are_a_user_error(tmp_path):
    (tmp_path / "results.json").write_text("{")
    with pytest.raises(UserError, match=r"results\.json cannot be read"):
        finished_results(spec_of(tmp_path))


def test_the_workers_error_message_is_taken_once(tmp_path):
    assert pop_worker_error(tmp_path) == ""
    (tmp_path / WORKER_ERROR_FILE).write_text("Traceback …\nLookupError: on purpose\n")
    assert pop_worker_error(tmp_path) == "LookupError: on purpose"
    assert pop_worker_error(tmp_path) == ""
