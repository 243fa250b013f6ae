"""A job's specification, its files in the run's directory, and what the ranks agree on."""

import json
import os
from pathlib import Path

import pytest
from commands import CommandResult, command, run_command
from hydra.types import RunMode
from omegaconf import OmegaConf
from tiny import SMALL, compose, records
from worlds import run_world

from metadist import kernels as native
from metadist.errors import UserError
from metadist.launchers import RunSpec
from metadist.launchers.job import finished_results, save_configuration
from metadist.reports import WORKER_ERROR_FILE, pop_worker_error, write_failure

WORDS = (*SMALL, "strategy=allreduce", "model.pooling=max", "trainer.iterations=2")


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


def test_paths_and_enumerations_of_a_configuration_become_text():
    values = {"root": Path("/data"), "mode": RunMode.RUN, "list": [Path("a"), 1]}
    read = RunSpec.from_yaml(RunSpec("a", Path("/b"), OmegaConf.create(values)).to_yaml())
    assert read.configuration == {"root": "/data", "mode": "RUN", "list": ["a", 1]}


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
    assert finished_results(spec_of(tmp_path, root="there")) == {"test_accuracy": 0.5}
    assert finished_results(spec_of(tmp_path, 20)) is None


def test_a_run_that_is_extended_has_no_results_until_it_ends(tmp_path):
    save_configuration(spec_of(tmp_path))
    finish(tmp_path)
    save_configuration(spec_of(tmp_path, 20))  # and now it is killed
    assert finished_results(spec_of(tmp_path, 20)) is None
    assert not (tmp_path / "results.json").exists()


def test_a_refused_start_does_not_spoil_a_finished_run(tmp_path):
    save_configuration(spec_of(tmp_path))
    finish(tmp_path)
    write_failure(tmp_path, ["seed=0"], "too many workers", 2)
    assert (tmp_path / "failure.json").exists()
    assert finished_results(spec_of(tmp_path)) == {"test_accuracy": 0.5}
    assert not (tmp_path / "failure.json").exists()


def test_unreadable_results_are_a_user_error(tmp_path):
    (tmp_path / "results.json").write_text("{")
    with pytest.raises(UserError, match=r"results\.json cannot be read"):
        finished_results(spec_of(tmp_path))


def test_the_workers_error_message_is_taken_once(tmp_path):
    assert pop_worker_error(tmp_path) == ""
    (tmp_path / WORKER_ERROR_FILE).write_text("Traceback …\nLookupError: on purpose\n")
    assert pop_worker_error(tmp_path) == "LookupError: on purpose"
    assert pop_worker_error(tmp_path) == ""


def no_compiler_on_rank_one(arguments: tuple[str, ...]) -> CommandResult:
    if os.environ["RANK"] == "1":
        os.environ["CXX"] = "false"
    return command("maml.py", arguments)


def test_native_kernels_are_used_on_all_ranks_or_none(tmp_path):
    if native.library("norm_relu_pool") is None:
        pytest.skip("there is no C++ compiler")
    mixed, plain = tmp_path / "mixed", tmp_path / "plain"
    ranks = run_world(no_compiler_on_rank_one, 2, (*WORDS, f"hydra.run.dir={mixed}"))
    assert [rank.status for rank in ranks] == [0, 0], ranks
    assert "machine of rank 1 has no working C++ compiler" in ranks[0].out + ranks[0].err
    assert "compiler" not in ranks[1].out + ranks[1].err
    ranks = run_command("maml.py", *WORDS, "model.native=false", f"hydra.run.dir={plain}", size=2)
    assert "compiler" not in ranks[0].out + ranks[0].err
    losses = [
        [record["train_loss"] for record in records(each) if "train_loss" in record]
        for each in (mixed, plain)
    ]
    assert len(losses[0]) == 2 and losses[0] == losses[1]
