"""Invalid input: one sentence on rank zero, exit status 2 on every rank, no traceback."""

import zipfile

import pytest
from commands import run_command
from tiny import SMALL


def error_message(*overrides: str, size: int = 2) -> str:
    """Run an invalid command, check every rank's output, and return rank zero's error."""
    outcomes = run_command("maml.py", *SMALL, *overrides, size=size)
    assert [outcome.status for outcome in outcomes] == [2] * size, outcomes
    message, others = outcomes[0].err, outcomes[1:]
    assert message.startswith("error: ") and message.count("\n") == 1, message
    assert "Traceback" not in message + outcomes[0].out
    assert all(outcome.err == "" and outcome.out == "" for outcome in others), others
    return message


OPTIONS = [
    (["datset=glyphs"], ["datset", "spelling"]),
    (["+partition=dim9"], ["dim9", "dim0", "batch"]),
    (["trainer.iteration=5"], ["trainer.iteration", "did you mean iterations"]),
    (["task.ways=7"], ["7", "validation", "6"]),
    (["optimizer.lr=-1"], ["optimizer", "-1"]),
    (["device=tpu7"], ["device=tpu7", "auto"]),
    (["strategy=local"], ["strategy=local", "2", "allreduce"]),
    (["+partition=dim0", "+partition.workers=[0,5]"], ["worker 5", "2"]),
    (["resume=nowhere/a.pt"], ["nowhere/a.pt", "resume="]),
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
    message = error_message(*overrides, *run_directory)
    assert all(text in message for text in expected), message


def test_dataset_root_that_is_missing_or_broken(tmp_path, monkeypatch):
    monkeypatch.setenv("METADIST_CACHE", str(tmp_path / "cache"))
    environment = {"METADIST_CACHE": str(tmp_path / "cache")}
    small = [each for each in SMALL if "dataset." not in each]

    def message(root) -> str:
        outcomes = run_command(
            "maml.py",
            *small,
            "dataset=omniglot",
            f"dataset.root={root}",
            f"hydra.run.dir={tmp_path}/run",
            size=2,
            environment=environment,
        )
        assert [outcome.status for outcome in outcomes] == [2, 2], outcomes
        assert outcomes[0].err.count("\n") == 1 and not outcomes[1].err, outcomes
        return outcomes[0].err

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
    run = f"hydra.run.dir={tmp_path}/run"
    assert run_command("maml.py", *SMALL, run)[0].status == 0
    newest = tmp_path / "run/checkpoints/iteration-00000004.pt"
    intact = newest.read_bytes()
    assert "earlier run" in error_message(run)
    assert "another run: model.filters was 4" in error_message(
        run, "resume=auto", "model.filters=5"
    )
    newest.write_bytes(intact[:1000])
    elsewhere = f"hydra.run.dir={tmp_path}/elsewhere"
    assert f"{newest.name} is corrupt" in error_message(elsewhere, f"resume={newest}")
    resumed = run_command("maml.py", *SMALL, run, "resume=auto")[0]
    assert resumed.status == 0 and resumed.err == "", resumed
    warnings = [line for line in resumed.out.splitlines() if "renamed to" in line]
    assert len(warnings) == 1 and newest.name in warnings[0], resumed.out
    assert newest.with_name(f"{newest.name}.corrupt").read_bytes() == intact[:1000]
