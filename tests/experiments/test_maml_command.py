"""`experiments/maml.py` under torchrun."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import ROOT, CommandResult, command, run_command
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
    return subprocess.Popen(
        [*TORCHRUN, *SMALL, *overrides],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
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
    options = ["trainer.iterations=40", "trainer.checkpoint_every=10", "trainer.eval_every=20"]
    train(str(uninterrupted), *options, "strategy=local")

    first = start(*options, f"hydra.run.dir={resumed}")
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:
        time.sleep(0.02)
        if (resumed / "metrics.jsonl").exists() and len(records(resumed)) > 3:
            break
    first.send_signal(signal.SIGINT)
    output, _ = first.communicate(timeout=300)
    assert first.returncode != 0 and "resume=auto" in output, output
    assert not is_alive(first.pid)
    done = len([line for line in records(resumed) if "train_loss" in line])
    assert 3 < done < 40

    options += ["logger=[console,jsonl]", f"hydra.run.dir={resumed}", "resume=auto"]
    second = run_command("maml.py", "+partition=dim0", *SMALL, *options, size=2)
    assert [rank.status for rank in second] == [0, 0], second
    assert "test accuracy" in second[0].out and str(resumed) in second[0].out
    assert (resumed / ".hydra" / "overrides.yaml").exists()
    assert without_times(records(resumed)) == without_times(records(uninterrupted))


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


def test_one_process_without_torchrun(tmp_path):
    run = (*SMALL, f"hydra.run.dir={tmp_path}")
    (outcome,) = run_world(command_without_torchrun, 1, *run)
    assert outcome.status == 0, outcome.err
    assert run_results(tmp_path)["world_size"] == 1


def test_all_ranks_share_one_directory(tmp_path):
    outcomes = run_command("maml.py", *SMALL, f"hydra.run.dir={tmp_path}/${{run_stamp:}}", size=3)
    assert [outcome.status for outcome in outcomes] == [0, 0, 0], outcomes
    assert all(outcome.out + outcome.err == "" for outcome in outcomes[1:])
    (run,) = Path(tmp_path).iterdir()
    assert {"results.json", "metrics.jsonl", ".hydra"} <= {path.name for path in run.iterdir()}


def test_several_loggers_at_once(tmp_path):
    (outcome,) = run_command(
        "maml.py",
        *SMALL,
        "logger=[console,jsonl,tensorboard]",
        f"hydra.run.dir={tmp_path}",
    )
    assert outcome.status == 0, outcome.err
    assert "test accuracy" in outcome.out
    assert list((tmp_path / "tensorboard").iterdir()) and len(records(tmp_path)) == 6


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
        (["seed=1", "--cfg", "job", "~scheduler"], "the flag --cfg stands between two overrides:"),
        (["seed=1", "hydra.run.dir="], "hydra.run.dir= is empty: give a path, or leave it out."),
    ],
)
def test_arguments_that_cannot_be_read_are_one_sentence(arguments, message):
    outcomes = run_command("maml.py", *arguments, size=2)
    assert [outcome.status for outcome in outcomes] == [2, 2]
    assert outcomes[0].err.startswith(f"error: {message}") and outcomes[0].err.count("\n") == 1
    assert outcomes[0].out == outcomes[1].out == outcomes[1].err == ""


@pytest.mark.parametrize("arguments", [["-cd", "lr=0.1", "-m"], ["--cfg", "job", "-p", "trainer"]])
def test_flags_with_values_are_before_or_after_the_overrides(tmp_path, arguments):
    (tmp_path / "lr=0.1").mkdir()
    options = [*SMALL, "trainer.iterations=1", f"hydra.sweep.dir={tmp_path}"]
    for order in ([*arguments, *options], [*options, *arguments]):
        (outcome,) = run_command("maml.py", *order, directory=tmp_path)
        assert outcome.status == 0, outcome.err


def test_a_program_may_start_without_standard_output(tmp_path):
    command = f'exec "{sys.executable}" experiments/maml.py "$@" >&-'
    arguments = ["sh", *SMALL, "trainer.iterations=1", f"hydra.run.dir={tmp_path}"]
    subprocess.run(["sh", "-c", command, *arguments], cwd=ROOT, check=True, timeout=60)
    assert (tmp_path / "results.json").exists()
