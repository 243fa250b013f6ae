"""A job's specification, its files in the run's directory, and what the ranks agree on."""

import json
import os
from pathlib import Path

import pytest
from commands import CommandResult, command, run_command
from hydra.types import RunMode
from omegaconf import OmegaConf
from tiny import SMALL, compose, records, train
from worlds import run_world

from metadist import kernels as native
from metadist.distributed import get_rank
from metadist.errors import UserError
from metadist.launchers import RunSpec
from metadist.launchers.job import (
    JobFailure,
    check_same_device,
    finished_results,
    run_job,
    save_configuration,
)
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


def run_in_own_directory(directory: str) -> tuple[str, bool]:
    """What a rank says whose run directory is not that of the others."""
    configuration = compose(*SMALL, "strategy=allreduce", "resume=auto")
    spec = RunSpec("maml", Path(directory) / str(get_rank()), configuration)
    try:
        run_job(spec)
    except JobFailure as failure:
        return str(failure.error), failure.in_job
    return "finished", False


def test_ranks_that_see_different_checkpoints_do_not_train(tmp_path):
    train(str(tmp_path / "0"), "strategy=local", "trainer.iterations=2")
    for message, in_job in run_world(run_in_own_directory, 2, str(tmp_path)):
        assert "the ranks found checkpoints of different iterations, [0, 2]" in message and in_job


def results_and_files(directory: str) -> tuple:
    built = []
    spec = RunSpec("maml", Path(directory), compose(*SMALL), ("a=1",))
    results = run_job(spec, on_built=built.append)
    return results.get("test_tasks"), len(built)


def test_a_job_trains_tests_and_saves_its_configuration(tmp_path):
    assert run_world(results_and_files, 2, str(tmp_path)) == [(7, 1), (None, 1)]
    saved = OmegaConf.load(tmp_path / ".hydra" / "config.yaml")
    assert saved == compose(*SMALL)
    assert OmegaConf.load(tmp_path / ".hydra" / "overrides.yaml") == ["a=1"]
    assert json.loads((tmp_path / "results.json").read_text())["world_size"] == 2


def test_ranks_on_cpus_among_ranks_on_gpus_are_refused():
    check_same_device(["cuda", "cuda"], ["a", "b"])
    check_same_device(["cpu"], ["a"])
    with pytest.raises(UserError, match=r"ranks \[1, 3\] \(b, d\) compute on the CPU"):
        check_same_device(["cuda", "cpu", "cuda", "cpu"], ["a", "b", "c", "d"])
