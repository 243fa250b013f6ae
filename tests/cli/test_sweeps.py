"""Sweeps: the same jobs on every rank, failed jobs, restarts, optimizing sweepers."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from commands import ROOT, run_command
from tiny import SMALL, records

from metadist.distributed import get_rank, get_world_size
from metadist.training import Callback

QUICK = [*SMALL, "trainer.iterations=2", "trainer.eval_tasks=3", "trainer.checkpoint_every=1"]


def sweep(directory, *overrides: str, size: int = 2, **options) -> list:
    overrides = ("-m", *QUICK, f"hydra.sweep.dir={directory}", *overrides)
    return run_command("maml.py", *overrides, size=size, **options)


def results(directory, job: int) -> dict:
    return json.loads((directory / str(job) / "results.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["rpc", "allreduce"])
def test_a_failed_job_is_reported_and_the_others_run(tmp_path, strategy):
    options = (f"strategy={strategy}", "optimizer=sgd", "optimizer.lr=0.001,1e30,0.01")
    options = (*options, "trainer.iterations=4", "sweep.on_failure=continue")
    ranks = sweep(tmp_path, *options)
    assert [rank.status for rank in ranks] == [1, 1], ranks
    assert ranks[0].err.count("error: ") == 2 and "(1)" in ranks[0].err, ranks[0].err
    assert "error: " not in ranks[1].err  # TensorPipe may warn that a peer left
    assert results(tmp_path, 0)["iterations"] == results(tmp_path, 2)["iterations"] == 4
    failure = json.loads((tmp_path / "1" / "failure.json").read_text())
    assert any(each.startswith("optimizer.lr=") for each in failure["overrides"])
    assert "tasks are not finite" in failure["error"] and failure["exit_status"] == 2
    assert "Failed:" in (tmp_path / "sweep.md").read_text()


def test_a_failed_job_ends_the_sweep_and_a_second_start_goes_on(tmp_path):
    ranks = sweep(tmp_path, "task.ways=3,50,2")
    assert {rank.status for rank in ranks} == {2}, ranks
    assert ranks[0].err.count("error: ") == 1
    # TensorPipe may warn that the other rank has closed a pipe.
    assert all("tensorpipe" in line for line in ranks[1].err.splitlines()), ranks[1].err
    assert not (tmp_path / "2").exists()
    first = (tmp_path / "0" / "results.json").stat().st_mtime_ns
    # The failed job is corrected; the first is not run again, nor are its results changed.
    ranks = sweep(tmp_path, "task.ways=3,4")
    assert [rank.status for rank in ranks] == [0, 0], ranks
    assert [rank.out.count("job 0 had finished before: ") for rank in ranks] == [1, 0]
    assert (tmp_path / "0" / "results.json").stat().st_mtime_ns == first
    assert not (tmp_path / "1" / "failure.json").exists()
    assert [results(tmp_path, job)["protocol"]["ways"] for job in range(2)] == [3, 4]


class StopsAfterTheTest(Callback):
    """The last rank receives a signal when the job has nearly finished."""

    def on_test_end(self, trainer, results):
        if get_rank() == get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(
    ("strategy", "size"), [pytest.param("local", 1, marks=pytest.mark.slow), ("allreduce", 2)]
)
def test_a_signal_after_the_test_ends_the_sweep(tmp_path, strategy, size):
    callback = f"+callbacks.stops._target_={__name__}.StopsAfterTheTest"
    ranks = sweep(tmp_path, callback, f"strategy={strategy}", "seed=0,1", size=size)
    assert [rank.status for rank in ranks] == [143] * size, ranks
    assert "stopped after job 0 of the sweep had finished" in ranks[0].err
    assert results(tmp_path, 0)["seed"] == 0 and not (tmp_path / "1").exists()


@pytest.mark.slow
def test_a_second_start_resumes_what_is_not_finished(tmp_path):
    sweep(tmp_path / "parts", "seed=0", size=1)
    before = len(records(tmp_path / "parts" / "0"))
    ranks = sweep(tmp_path / "parts", "seed=0", "trainer.iterations=4", size=1)
    assert ranks[0].status == 0, ranks
    sweep(tmp_path / "whole", "seed=0", "trainer.iterations=4", size=1)
    parts, whole = results(tmp_path / "parts", 0), results(tmp_path / "whole", 0)
    assert parts["iterations"] == 4 and len(records(tmp_path / "parts" / "0")) > before
    assert parts["train_loss"] == whole["train_loss"]


@pytest.mark.slow
def test_a_job_with_only_its_best_checkpoint_is_resumed(tmp_path):
    overrides = ("seed=0", "trainer.iterations=4")
    sweep(tmp_path, *overrides, size=1)
    whole = results(tmp_path, 0)
    for path in (tmp_path / "0" / "checkpoints").glob("iteration-*.pt"):
        path.unlink()
    (tmp_path / "0" / "results.json").unlink()
    (outcome,) = sweep(tmp_path, *overrides, size=1)
    assert outcome.status == 0, outcome
    assert results(tmp_path, 0)["train_loss"] == whole["train_loss"]


@pytest.mark.slow
def test_launched_jobs_that_are_refused_or_fail_do_not_end_the_others(tmp_path):
    overrides = (f"hydra.sweep.dir={tmp_path}", "launcher.nproc_per_node=999,1", "task.ways=50")
    process = start(*overrides, "sweep.on_failure=continue")
    out, _ = process.communicate(timeout=180)
    assert process.returncode == 1, out
    refused, failed = (
        json.loads((tmp_path / job / "failure.json").read_text()) for job in ("0", "1")
    )
    assert "999" in refused["error"] and "has only 12 classes" in failed["error"]
    assert refused["exit_status"] == failed["exit_status"] == 2


def test_the_error_of_each_failed_job_is_printed(tmp_path):
    options = ("task.ways=500,600", "sweep.on_failure=continue", "strategy=local")
    (rank,) = sweep(tmp_path, *options, size=1)
    assert rank.status != 0
    for ways in (500, 600):
        assert rank.err.count(f"error: task.ways is {ways}") == 1, rank.err


def test_the_failed_job_is_named_beside_one_of_an_earlier_sweep(tmp_path):
    (tmp_path / "1").mkdir()
    failure = {"error": "earlier", "exit_status": 2, "overrides": ["task.ways=600"]}
    (tmp_path / "1" / "failure.json").write_text(json.dumps(failure))
    (rank,) = sweep(tmp_path, "task.ways=500,3", "strategy=local", size=1)
    assert "the sweep ended with the failed job (0): after a correction, the same" in rank.err


def test_a_job_of_other_options_is_refused_and_the_results_stay(tmp_path):
    for options, status, message in (
        (("algorithm.inner_lr=0.1",), 0, ""),
        (("algorithm.inner_lr=0.2",), 2, "the sweep ended with the failed job (0): after a "),
        (
            ("algorithm.inner_lr=0.2", "sweep.on_failure=continue"),
            1,
            "error: 2 jobs of the sweep failed (0, 1) in directories with the results of a run",
        ),
    ):
        (rank,) = sweep(tmp_path, *options, "seed=0,1", "strategy=local", size=1)
        assert rank.status == status and message in rank.err, rank
    assert "2 runs finished\n" in rank.out and not (tmp_path / "0" / "failure.json").exists()


@pytest.mark.slow
def test_a_rank_that_cannot_build_is_recorded(tmp_path):
    overrides = ("algorithm._target_=broken_parts.BrokenMAML", "+algorithm.where=start")
    overrides = (*overrides, "+algorithm.rank=1,5")  # there is no rank 5: that job succeeds
    path = {"PYTHONPATH": str(ROOT / "tests")}
    ranks = sweep(tmp_path, *overrides, "sweep.on_failure=continue", environment=path)
    assert [rank.status for rank in ranks] == [1, 1], ranks
    record = json.loads((tmp_path / "0" / "failure.json").read_text())
    assert "rank 1 failed while building: " in record["error"] and "on purpose" in record["error"]
    assert results(tmp_path, 1)["iterations"] == 2


@pytest.mark.slow
def test_each_failed_job_has_its_own_error_in_its_directory(tmp_path):
    overrides = ("algorithm._target_=broken_parts.BrokenMAML", "+algorithm.rank=1")
    overrides = (*overrides, "strategy=allreduce", "trainer.iterations=12", "task.ways=3,500")
    path = {"PYTHONPATH": str(ROOT / "tests")}
    ranks = sweep(tmp_path, *overrides, "sweep.on_failure=continue", environment=path)
    assert [rank.status for rank in ranks] == [1, 1], ranks
    assert "task.ways is 500" in ranks[0].err
    error = (tmp_path / "0" / "error.txt").read_text()
    assert "on purpose" in error and "task.ways" not in error


@pytest.mark.slow
@pytest.mark.parametrize("gradient", ["worker", "dist_autograd"])
def test_after_a_stuck_task_the_next_job_runs_or_the_sweep_says_why_not(tmp_path, gradient):
    overrides = ("algorithm._target_=broken_parts.BrokenMAML", "+algorithm.where=hang")
    overrides = (*overrides, "+algorithm.rank=1,5")  # there is no rank 5: that job succeeds
    overrides = (*overrides, "strategy.call_timeout=4", f"strategy.gradient={gradient}")
    overrides = (*overrides, "trainer.iterations=12")
    path = {"PYTHONPATH": str(ROOT / "tests")}
    ranks = sweep(tmp_path, *overrides, "sweep.on_failure=continue", environment=path)
    printed = "".join(rank.err for rank in ranks)
    assert "did not respond within" in printed and "already initialized" not in printed, printed
    if gradient == "worker":  # the task runs on a thread that RPC does not wait for
        assert [rank.status for rank in ranks] == [1, 1], ranks
        assert results(tmp_path, 1)["iterations"] == 12
    else:
        assert all(rank.status for rank in ranks), ranks
        assert printed.count("a rank has not left job 0") == 1, printed


@pytest.mark.slow
def test_unreadable_results_are_reported_once(tmp_path):
    sweep(tmp_path, "seed=0,1")
    (tmp_path / "0" / "results.json").write_text("{")
    (tmp_path / "1" / "results.json").unlink()
    ranks = sweep(tmp_path, "seed=0,1", "sweep.on_failure=continue")
    assert {rank.status for rank in ranks} == {1}, ranks
    assert "results.json cannot be read" in ranks[0].err and "cannot be read" not in ranks[1].err
    assert results(tmp_path, 1)["iterations"] == 2


def test_a_refused_run_leaves_no_directory_and_torchrun_gets_its_error(tmp_path):
    error_file = tmp_path / "error.json"
    (outcome,) = run_command(
        "maml.py",
        *QUICK,
        f"hydra.run.dir={tmp_path / 'run'}",
        "task.ways=50",
        environment={"TORCHELASTIC_ERROR_FILE": str(error_file)},
    )
    assert outcome.status == 2 and not (tmp_path / "run").exists()
    message = json.loads(error_file.read_text())["message"]
    assert message["message"] in outcome.err and "task.ways" in message["extraInfo"]["py_callstack"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["sweep.on_failure=maybe"], "'stop' or 'continue'"),
        (["launcher=torchrun"], "already running under torchrun"),
        (["hydra/sweeper=nowhere"], "nowhere is not an option of hydra/sweeper"),
        (["dataset=omniglott"], "(did you mean omniglot?): choose one of"),
        (["algorithm._target_=metadist.algorithms.Mam"], "(did you mean MAML?)"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                (["trainer.iteratons=3"], "(did you mean iterations?): the keys of trainer are"),
                (["optimiser=sgd"], "(did you mean optimizer?)"),
            )
        ),
    ],
)
def test_refused_overrides(tmp_path, overrides, message):
    (outcome,) = run_command("maml.py", *QUICK, f"hydra.run.dir={tmp_path / 'run'}", *overrides)
    assert outcome.status == 2 and message in outcome.err and outcome.err.count("error: ") == 1


@pytest.mark.slow
def test_optuna_finds_the_best_and_refuses_the_wrong_direction(tmp_path):
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    options = ["hydra/sweeper=optuna", "hydra/sweeper/sampler=grid", "hydra.sweeper.n_trials=2"]
    options += ["optimizer.lr=choice(1e-9,0.05)", "trainer.iterations=12", "trainer.eval_every=12"]
    (outcome,) = sweep(tmp_path, *options, "hydra.sweeper.direction=maximize", size=1)
    assert outcome.status == 0, outcome
    values = [results(tmp_path, job)["validation_accuracy"] for job in range(2)]
    best = (tmp_path / "optimization_results.yaml").read_text()
    assert f"best_value: {max(values)}" in best
    (outcome,) = sweep(
        tmp_path / "worst", *options, size=1
    )  # the sweeper's own default is minimize
    assert outcome.status == 2 and "direction=maximize" in outcome.err
    assert outcome.err.count("\n") == 1 and not (tmp_path / "worst" / "0").exists()


def start(*overrides: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "experiments/maml.py", "-m", *QUICK, "launcher=torchrun", *overrides],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
def test_a_sweep_of_launched_jobs(tmp_path):
    overrides = ["launcher.nproc_per_node=2", "launcher.jobs=2", "launcher.oversubscribe=true"]
    overrides += ["task.ways=3,50", "sweep.on_failure=continue", f"hydra.sweep.dir={tmp_path}"]
    parent = start(*overrides)
    output, _ = parent.communicate(timeout=120)
    assert parent.returncode == 1, output
    assert "Traceback" not in output and output.count("has only 12 classes") == 1, output
    assert results(tmp_path, 0)["world_size"] == 2 and (tmp_path / "sweep.png").exists()
    failure = json.loads((tmp_path / "1" / "failure.json").read_text())
    assert failure["exit_status"] == 2 and "has only 12 classes" in failure["error"]


def processes(text: str) -> list[str]:
    """The processes whose command line contains a text."""
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    return [line for line in listed.stdout.splitlines() if text in line]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_the_launching_process_saves_and_leaves_no_process(tmp_path, number):
    parent = start(
        "launcher.nproc_per_node=2",
        "launcher.oversubscribe=true",
        "trainer.iterations=100000",
        "trainer.eval_every=0",
        "trainer.checkpoint_every=0",
        f"hydra.sweep.dir={tmp_path}",
    )
    run = tmp_path / "0"
    deadline = time.monotonic() + 180
    while not ((run / "metrics.jsonl").exists() and len(records(run)) > 3):
        assert parent.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    parent.send_signal(number)
    output, _ = parent.communicate(timeout=180)  # until the last worker has closed its output
    assert parent.returncode == (-number if number == signal.SIGKILL else 128 + number), output
    assert list((run / "checkpoints").glob("iteration-*.pt"))
    deadline = time.monotonic() + 120
    while processes(str(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not processes(str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["joblib", "submitit_local"])
def test_hydras_other_launchers_start_jobs_too(tmp_path, launcher):
    pytest.importorskip(f"hydra_plugins.hydra_{launcher.removesuffix('_local')}_launcher")
    parent = start(
        "launcher.nproc_per_node=2",
        "launcher.oversubscribe=true",
        f"hydra/launcher={launcher}",
        "seed=0,1",
        f"hydra.sweep.dir={tmp_path}",
    )
    output, _ = parent.communicate(timeout=240)
    assert parent.returncode == 0, output
    assert [results(tmp_path, job)["seed"] for job in (0, 1)] == [0, 1]
    sweep(tmp_path / "torchrun", "seed=0")
    assert results(tmp_path, 0)["train_loss"] == results(tmp_path / "torchrun", 0)["train_loss"]
