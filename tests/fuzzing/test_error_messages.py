"""Invalid input: one sentence on rank zero, exit status 2 on every rank, no traceback."""

import zipfile

import pytest
from commands import run_command, specification
from tiny import SMALL


def error_message(*command: str, size: int = 2) -> str:
    """Run an invalid command, check every rank's output, and return rank zero's error."""
    outcomes = run_command(*command, size=size)
    assert [outcome.status for outcome in outcomes] == [2] * size, outcomes
    message, others = outcomes[0].err, outcomes[1:]
    assert message.startswith("error: ") and message.count("\n") == 1, message
    assert "Traceback" not in message + outcomes[0].out
    assert all(outcome.err == "" and outcome.out == "" for outcome in others), others
    return message


OPTIONS = [
    (["datset=glyphs"], ["datset", "spelling"]),
    (["task.ways=7"], ["7", "validation", "6"]),
    (["hydra.run.dir=/dev/null/x"], ["/dev/null", "hydra.run.dir"]),
]
MORE_OPTIONS = [
    (["iterations=5"], ["iterations", "did you mean trainer.iterations?"]),
    (["seed=-1"], ["seed=-1"]),
    (["algorithm._target_=my.Algorithm"], ["my.Algorithm", "imported"]),
    (["dataset=letters"], ["letters", "glyphs", "omniglot", "sinusoid"]),
    (["+trainer.iteration=5"], ["trainer.iteration", "iterations"]),
    (["trainer.iterations=many"], ["trainer.iterations=many", "integer"]),
    (["trainer.iterations=-1"], ["trainer.iterations=-1", "0"]),
    (["trainer.meta_batch_size=-3"], ["trainer.meta_batch_size=-3"]),
    (["task.ways=0"], ["task.ways=0"]),
    (["task.shots=3", "task.queries=4"], ["7", "6"]),
    (["task.shots=-1"], ["task.shots=-1"]),
    (["algorithm.inner_lr=0"], ["algorithm.inner_lr=0"]),
    (["algorithm.inner_steps=1.5"], ["algorithm.inner_steps=1.5", "integer"]),
    (["model.pooling=mean"], ["model.pooling=mean", "stride"]),
    (["model.filters=0"], ["model.filters=0"]),
    (["+partitions=batch"], ["partitions", "partition"]),
    (["+trainr.iterations=3"], ["trainr", "trainer"]),
    (
        ["++dataset.size=8", "task.ways=1", "task.shots=1", "task.queries=1"],
        ["task.ways is 1", "2"],
    ),
    (["seed=one"], ["seed=one"]),
    (["+partition=dim0", "+partition.workers=[worker9]"], ["worker9"]),
    (["partition=dim0"], ["partition", "+partition"]),
    (["trainer.iterations"], ["trainer.iterations", "KEY=VALUE"]),
]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [*OPTIONS, *(pytest.param(*each, marks=pytest.mark.slow) for each in MORE_OPTIONS)],
)
def test_invalid_options(tmp_path, overrides, expected):
    run_directory = [] if "hydra.run.dir" in str(overrides) else [f"hydra.run.dir={tmp_path}/run"]
    message = error_message("maml.py", *SMALL, *overrides, *run_directory)
    assert all(text in message for text in expected), message


@pytest.mark.parametrize(
    ("size", "overrides", "expected"),
    [
        (2, ["strategy=local"], ["strategy=local", "2", "allreduce"]),
        (2, ["+partition=dim0", "+partition.workers=[0,5]"], ["worker 5", "2"]),
        (1, ["optimizer.lr=-1"], ["optimizer", "-1"]),
        (1, ["device=tpu7"], ["device=tpu7", "auto"]),
        (1, ["resume=nowhere/a.pt"], ["nowhere/a.pt", "resume="]),
    ],
)
def test_options_that_do_not_fit_the_job(tmp_path, size, overrides, expected):
    file = specification(tmp_path / "run", *SMALL, *overrides)
    message = error_message("worker", file, size=size)
    assert all(text in message for text in expected), message


def test_dataset_root_that_is_missing_or_broken(tmp_path, monkeypatch):
    monkeypatch.setenv("METADIST_CACHE", str(tmp_path / "cache"))
    environment = {"METADIST_CACHE": str(tmp_path / "cache")}
    small = [each for each in SMALL if "dataset." not in each]

    def message(root) -> str:
        options = (*small, "dataset=omniglot", f"dataset.root={root}")
        file = specification(tmp_path / "run", *options)
        (outcome,) = run_command("worker", file, environment=environment)
        assert outcome.status == 2 and outcome.err.count("\n") == 1, outcome
        return outcome.err

    file = tmp_path / "file"
    file.write_text("no folder")
    assert str(file) in message(file)
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "images_background.zip").write_bytes(b"no zip")
    with zipfile.ZipFile(broken / "images_evaluation.zip", "w") as archive:
        archive.writestr("images_evaluation/A/character01/0001_01.png", b"no image")
    assert "images_background.zip" in message(broken)


def test_corrupted_checkpoints(tmp_path):
    run = tmp_path / "run"
    assert run_command("worker", specification(run, *SMALL))[0].status == 0
    newest = run / "checkpoints/iteration-00000004.pt"
    intact = newest.read_bytes()
    assert "earlier run" in error_message("worker", specification(run, *SMALL))
    other = specification(run, *SMALL, "resume=auto", "model.filters=5")
    assert "another run: model.filters was 4" in error_message("worker", other, size=1)
    newest.write_bytes(intact[:1000])
    elsewhere = specification(tmp_path / "elsewhere", *SMALL, f"resume={newest}")
    assert f"{newest.name} is corrupt" in error_message("worker", elsewhere, size=1)
    resumed = run_command("maml.py", *SMALL, f"hydra.run.dir={run}", "resume=auto")[0]
    assert resumed.status == 0 and resumed.err == "", resumed
    warnings = [line for line in resumed.out.splitlines() if "renamed to" in line]
    assert len(warnings) == 1 and newest.name in warnings[0], resumed.out
    assert newest.with_name(f"{newest.name}.corrupt").read_bytes() == intact[:1000]
