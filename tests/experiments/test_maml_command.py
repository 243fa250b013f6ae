"""`experiments/maml.py` under torchrun."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import (
    ROOT,
    CommandResult,
    command,
    run_command,
    specification,
    without_gloo,
)
from tiny import SMALL, records, run_results, train, without_times
from worlds import run_world

TORCHRUN = [
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc_per_node=2",
    "experiments/maml.py",
    "+partition=dim0",
]


def start(*overrides: str) -> subprocess.Popen:
    path = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [*TORCHRUN, *SMALL, *overrides],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def is_alive(group: int) -> bool:
    """Whether a process of the group is still alive."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_interrupt_and_resume_under_torchrun(tmp_path):
    uninterrupted, resumed = tmp_path / "uninterrupted", tmp_path / "resumed"
    options = ["trainer.iterations=6"]
    run_world(train, 1, str(uninterrupted), *options, "strategy=local")

    stops = "+callbacks.stops._target_=broken_parts.InterruptsTorchrun"
    first = start(*options, stops, f"hydra.run.dir={resumed}")
    output, _ = first.communicate(timeout=300)
    assert first.returncode != 0 and "resume=auto" in output, output
    assert not is_alive(first.pid)
    assert 3 <= len([line for line in records(resumed) if "train_loss" in line]) < 6

    options += ["+partition=dim0", "logger=[console,jsonl]", "resume=auto"]
    second = run_command("worker", specification(resumed, *SMALL, *options), size=2)
    assert [rank.status for rank in second] == [0, 0], second
    assert "test accuracy" in second[0].out and str(resumed) in second[0].out
    assert (resumed / ".hydra" / "overrides.yaml").exists()
    assert without_times(records(resumed)) == without_times(records(uninterrupted))


@pytest.mark.slow
def test_an_error_under_torchrun_is_reported_once_and_ends_all_processes(tmp_path):
    process = start("task.ways=50", f"hydra.run.dir={tmp_path / 'run'}")
    output, _ = process.communicate(timeout=300)
    assert process.returncode != 0
    assert output.count("error: ") == 1, output
    assert not is_alive(process.pid)


def command_without_torchrun(*overrides: str) -> CommandResult:
    for name in list(os.environ):
        if name.startswith(("RANK", "WORLD_", "LOCAL_", "MASTER_", "TORCHELASTIC_")):
            del os.environ[name]
    return command("maml.py", overrides)


def test_one_process_without_torchrun_and_several_loggers_at_once(tmp_path):
    options = ("logger=[console,jsonl,tensorboard]", f"hydra.run.dir={tmp_path}")
    (outcome,) = run_world(command_without_torchrun, 1, *SMALL, *options)
    assert outcome.status == 0, outcome.err
    assert run_results(tmp_path)["world_size"] == 1
    assert "test accuracy" in outcome.out
    assert list((tmp_path / "tensorboard").iterdir()) and len(records(tmp_path)) == 6


def test_all_ranks_share_one_directory(tmp_path):
    options = ("trainer.iterations=1", f"hydra.run.dir={tmp_path}/${{run_stamp:}}")
    outcomes = run_command("maml.py", *SMALL, *options, size=2)
    assert [outcome.status for outcome in outcomes] == [0, 0], outcomes
    assert without_gloo(outcomes[1].out) + outcomes[1].err == ""
    (run,) = Path(tmp_path).iterdir()
    assert {"results.json", "metrics.jsonl", ".hydra"} <= {path.name for path in run.iterdir()}


@pytest.mark.slow
def test_multirun_runs_one_job_after_the_other(tmp_path):
    outcomes = run_command(
        "maml.py",
        "-m",
        *SMALL,
        "seed=0,1",
        "trainer.iterations=2",
        f"hydra.sweep.dir={tmp_path}",
        size=2,
    )
    assert [outcome.status for outcome in outcomes] == [0, 0], outcomes
    seeds = [run_results(tmp_path / job)["seed"] for job in "01"]
    assert seeds == [0, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["seed=1", "-m", "seed=2"],
            "the flag -m stands between two overrides: write",
        ),
        (
            ["trainer.iterations=3", "--mulitrun", "seed=1,2"],
            "there is no flag --mulitrun (did you mean --multirun?): options are given as",
        ),
        (["seed=1", "--multi", "seed=2"], "the flag --multi stands between two overrides:"),
        (["seed=1", "--cfg", "job", "~scheduler"], "the flag --cfg stands between two overrides:"),
        (["seed=1", "hydra.run.dir="], "hydra.run.dir= is empty: give a path, or leave it out."),
        (["hydra.run.dir=''"], "hydra.run.dir='' is empty: give a path, or leave it out."),
        (["dataset=omniglot", "dataset.root="], "dataset.root= is empty: give a path, or leave"),
    ],
)
def test_arguments_that_cannot_be_read_are_one_sentence(arguments, message):
    outcomes = run_command("maml.py", *arguments, size=2)
    assert [outcome.status for outcome in outcomes] == [2, 2]
    assert outcomes[0].err.startswith(f"error: {message}") and outcomes[0].err.count("\n") == 1
    assert outcomes[0].out == outcomes[1].out == outcomes[1].err == ""


def test_flags_with_values_are_before_or_after_the_overrides(tmp_path):
    (tmp_path / "lr=0.1").mkdir()
    flags = ["-cd", "lr=0.1", "--cfg", "job", "-p", "trainer"]
    for order in ([*flags, *SMALL], [*SMALL, *flags]):
        (outcome,) = run_command("maml.py", *order, directory=tmp_path)
        assert outcome.status == 0 and "iterations: 4" in outcome.out, outcome


@pytest.mark.slow
def test_a_program_may_start_without_standard_output(tmp_path):
    command = f'exec "{sys.executable}" experiments/maml.py "$@" >&-'
    arguments = ["sh", *SMALL, "trainer.iterations=1", f"hydra.run.dir={tmp_path}"]
    subprocess.run(["sh", "-c", command, *arguments], cwd=ROOT, check=True, timeout=300)
    assert (tmp_path / "results.json").exists()
