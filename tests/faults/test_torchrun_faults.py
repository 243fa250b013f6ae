"""Two faults under torchrun; `make faults` injects all of them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import ROOT
from tiny import SMALL, records, train, without_times
from worlds import run_world

OPTIONS = ("strategy=allreduce", "trainer.iterations=60")


def torchrun(directory: Path, *options: str) -> subprocess.Popen:
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"),
            *(each for each in options if each.startswith("--")),
            *("experiments/maml.py", *SMALL, *OPTIONS, f"hydra.run.dir={directory}"),
            *(each for each in options if not each.startswith("--")),
        ],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def worker(agent: int, rank: int) -> int | None:
    """The process id of a rank, from /proc; None if it has ended."""
    for entry in Path("/proc").iterdir():
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == agent and f"\0RANK={rank}\0" in (entry / "environ").read_text():
                return int(entry.name)
        except (OSError, ValueError, IndexError):
            continue
    return None


def kill_when(process: subprocess.Popen, directory: Path, lines: int, rank: int, number: int):
    deadline = time.monotonic() + 60
    while not ((directory / "metrics.jsonl").exists() and len(records(directory)) >= lines):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(worker(process.pid, rank), number)


pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux's /proc")


@pytest.mark.slow
def test_torchrun_restarts_a_killed_rank_zero_with_equal_results(tmp_path):
    process = torchrun(tmp_path / "restarted", "--max-restarts=1")
    kill_when(process, tmp_path / "restarted", 10, 0, signal.SIGKILL)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    run_world(train, 2, str(tmp_path / "undisturbed"), *OPTIONS)
    restarted, undisturbed = records(tmp_path / "restarted"), records(tmp_path / "undisturbed")
    assert without_times(restarted) == without_times(undisturbed)


@pytest.mark.slow
def test_a_frozen_worker_ends_the_job_and_is_reported_once(tmp_path):
    process = torchrun(tmp_path, "timeout_seconds=3", "trainer.iterations=100000")
    kill_when(process, tmp_path, 10, 1, signal.SIGSTOP)
    frozen = worker(process.pid, 1)
    # torchrun waits 30 s for the frozen process; the other rank ends before that.
    deadline = time.monotonic() + 30
    while worker(process.pid, 0) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert worker(process.pid, 0) is None, "rank zero is still alive"
    os.kill(frozen, signal.SIGKILL)
    output, _ = process.communicate(timeout=180)
    assert process.returncode != 0
    assert output.count("error: ") == 1 and "rank 1 on " in output, output
