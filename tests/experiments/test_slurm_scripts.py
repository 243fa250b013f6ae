"""The batch scripts of docs/slurm, with stubs for `srun` and `scontrol`."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import ROOT
from tiny import SMALL, records, run_results, without_times

SCRIPTS = ROOT / "docs" / "slurm"
STUBS = {
    # srun kills its tasks after SIGTERM.
    "srun": """trap 'kill -KILL $task' TERM
        (echo $BASHPID > "$TASK"; exec "$@") & task=$!; wait $task""",
    "scancel": '[ "$*" = "--signal=TERM $SLURM_JOB_ID.0" ] && kill -TERM "$(cat "$TASK")"',
    "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
    "scontrol": 'if [ "$1" = requeue ]; then echo "$2" >> "$REQUEUED"; else echo 127.0.0.1; fi',
}
OPTIONS = ("+partition=dim0", "trainer.iterations=40", "trainer.eval_every=0")


def sbatch(tmp_path: Path, script: str, *arguments: str) -> subprocess.Popen:
    """Start a batch script with SLURM's variables for one node with two CPUs."""
    (tmp_path / "bin").mkdir(exist_ok=True)
    for name, body in STUBS.items():
        stub = tmp_path / "bin" / name
        stub.write_text(f"#!/usr/bin/env bash\n{body}\n")
        stub.chmod(0o755)
    variables = {
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "REQUEUED": str(tmp_path / "requeued"),
        "TASK": str(tmp_path / "task"),
        "SLURM_ARRAY_JOB_ID": "7",
        "SLURM_ARRAY_TASK_ID": "4",
        "SLURM_CPUS_PER_TASK": "2",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "node0",
        "SLURM_NNODES": "1",
        "TP_SOCKET_IFNAME": "lo",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    return subprocess.Popen(
        ["bash", str(SCRIPTS / script), *arguments],
        cwd=ROOT,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.mark.slow
def test_a_run_is_saved_and_requeued_before_the_time_limit_and_resumes(tmp_path):
    run = tmp_path / "run"
    longer = (*SMALL, *OPTIONS, "trainer.iterations=2000")
    job = sbatch(tmp_path, "train.sbatch", str(run), *longer)
    deadline = time.monotonic() + 180
    while not ((run / "metrics.jsonl").exists() and len(records(run)) > 3):
        assert job.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    job.send_signal(signal.SIGUSR1)
    output, _ = job.communicate(timeout=180)
    assert (tmp_path / "requeued").read_text() == f"{os.getpid()}\n", output
    saved = max((run / "checkpoints").glob("iteration-*.pt"))
    iteration = int(saved.stem.partition("-")[2])
    assert 0 < iteration < 2000 and not (run / "results.json").exists()

    arguments = (*SMALL, *OPTIONS, f"trainer.iterations={iteration + 20}")
    job = sbatch(tmp_path, "train.sbatch", str(run), *arguments)
    output, _ = job.communicate(timeout=180)
    assert job.returncode == 0, output
    whole = sbatch(tmp_path, "train.sbatch", str(tmp_path / "whole"), *arguments)
    output, _ = whole.communicate(timeout=180)
    assert whole.returncode == 0, output
    assert without_times(records(run)) == without_times(records(tmp_path / "whole"))
    assert len((tmp_path / "requeued").read_text().splitlines()) == 1


@pytest.mark.slow
def test_an_array_task_runs_its_point_of_the_grid(tmp_path):
    job = sbatch(tmp_path, "array.sbatch", str(tmp_path / "sweep"), *SMALL, *OPTIONS)
    output, _ = job.communicate(timeout=180)
    assert job.returncode == 0, output
    results = run_results(tmp_path / "sweep" / "4")
    assert results["seed"] == 1 and results["world_size"] == 2
    assert results["method"]["options"]["inner_lr"] == 0.4


@pytest.mark.parametrize("script", ["train.sbatch", "array.sbatch"])
def test_the_agent_gets_the_cpus_of_its_task(tmp_path, monkeypatch, script):
    # Since Slurm 22.05 srun does not read SLURM_CPUS_PER_TASK.
    monkeypatch.setitem(STUBS, "srun", 'echo "srun with ${SRUN_CPUS_PER_TASK:-1} CPUs per task"')
    output, _ = sbatch(tmp_path, script, str(tmp_path / "run")).communicate(timeout=180)
    assert output == "srun with 2 CPUs per task\n"


@pytest.mark.parametrize("script", ["train.sbatch", "array.sbatch"])
def test_torchrun_gets_sigterm_before_the_time_limit(tmp_path, monkeypatch, script):
    stub = "trap 'echo saved; exit 1' TERM; echo started; while true; do sleep 0.1; done"
    monkeypatch.setitem(STUBS, "torchrun", stub)
    job = sbatch(tmp_path, script, str(tmp_path / "run"))
    assert job.stdout.readline() == "started\n"
    job.send_signal(signal.SIGUSR1)
    output, _ = job.communicate(timeout=60)
    assert output == "saved\n"
    assert len((tmp_path / "requeued").read_text().splitlines()) == 1


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.sbatch")), ids=lambda path: path.name)
def test_the_scripts_have_valid_syntax(script):
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert script.name in (ROOT / "docs" / "slurm.md").read_text(encoding="utf-8")
