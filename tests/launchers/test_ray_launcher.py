"""launcher=ray: the numbers of any other world, checkpoints with Ray, workers that die."""

import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("ray")

from commands import ROOT
from ray_workers import kill_a_worker_once, planned, worker_processes
from test_layers import imported
from tiny import SMALL, records, train, without_times
from worlds import run_world

from metadist.distributed.world import usable_cpus
from metadist.errors import UserError
from metadist.launchers.job import JobFailure
from metadist.launchers.ray.launcher import RayLauncher
from metadist.launchers.ray.run import RayRun
from metadist.launchers.ray.worker import Errand, _leave_last_words
from metadist.reports import pop_worker_error
from metadist.training import Interrupted

pytestmark = pytest.mark.slow  # `make test-slow` installs Ray

LONGER = ("trainer.iterations=40", "trainer.eval_every=10", "trainer.checkpoint_every=5")


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def results(directory: Path) -> dict:
    found = json.loads((directory / "results.json").read_text(encoding="utf-8"))
    return {k: v for k, v in found.items() if k not in ("tasks_per_second", "wall_seconds")}


def equal_runs(one: Path, other: Path) -> None:
    """Bit for bit: every figure of every iteration, and the test."""
    assert without_times(records(one)) == without_times(records(other))
    assert results(one) == results(other)


def test_without_ray_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"Ray is not installed.*pip install 'metadist\[ray\]'"):
        RayLauncher().check({})


def test_more_workers_than_cpus_are_refused_before_ray_starts(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(UserError, match=r"launcher\.num_workers=\d+ .* this machine has \d+"):
        RayLauncher(num_workers=usable_cpus() + 1).check({})


def test_a_cluster_that_is_not_there_is_one_sentence_soon(free_port):
    with pytest.raises(UserError, match=r"there is no Ray cluster at 127\.0\.0\.1:"):
        RayLauncher(address=f"127.0.0.1:{free_port}").check({})


def test_nobody_else_pays_for_it():
    """Ray's files alone import Ray, and nobody imports them before launcher=ray is asked for."""
    for path in (ROOT / "metadist").rglob("*.py"):
        if path.parent != ROOT / "metadist" / "launchers" / "ray":
            rays = re.compile(r"(metadist\.launchers\.)?ray\b")
            assert not [name for name in imported(path) if rays.match(name)], path


def test_a_run_in_ray_workers_is_that_of_any_other_world(ray, tmp_path, capsys):
    assert RayLauncher(num_workers=2).run(planned(tmp_path / "ray", "logger=console")) == 0
    said = capsys.readouterr().out
    assert "rpc on 2 workers" in said and "test accuracy" in said
    run_world(train, 2, str(tmp_path / "other"))
    equal_runs(tmp_path / "ray", tmp_path / "other")
    # Ray's storage has the run's newest checkpoint, and no copy of it.
    own = tmp_path / "ray" / "checkpoints" / "iteration-00000004.pt"
    assert (tmp_path / "ray/ray/checkpoint_iteration-00000004/iteration-00000004.pt").samefile(own)
    snapshot = (tmp_path / "ray" / "ray" / "checkpoint_manager_snapshot.json").read_text()
    assert "checkpoint_iteration-00000004" in snapshot and "validation_accuracy" in snapshot


@pytest.mark.parametrize("strategy", ["allreduce", "local"])
def test_every_strategy(ray, tmp_path, strategy):
    size = 1 if strategy == "local" else 2
    word = f"strategy={strategy}"
    assert RayLauncher(num_workers=size).run(planned(tmp_path / "ray", word)) == 0
    run_world(train, size, str(tmp_path / "other"), word)
    equal_runs(tmp_path / "ray", tmp_path / "other")


@pytest.mark.parametrize("strategy", ["rpc", "allreduce"])
def test_a_killed_worker_changes_nothing(ray, tmp_path, strategy, capsys):
    word, directory = f"strategy={strategy}", tmp_path / "ray"
    killed = kill_a_worker_once(lambda: (directory / "checkpoints").is_dir())
    assert RayLauncher(num_workers=2).run(planned(directory, word, *LONGER)) == 0
    assert killed and "attempt 2 of the run" in capsys.readouterr().err
    run_world(train, 2, str(tmp_path / "other"), word, *LONGER)
    equal_runs(directory, tmp_path / "other")


def test_too_many_deaths_end_the_run(ray, tmp_path, capsys):
    killed = kill_a_worker_once(lambda: (tmp_path / "checkpoints").is_dir())
    launcher = RayLauncher(num_workers=2, max_failures=0)
    assert launcher.run(planned(tmp_path, "trainer.iterations=4000")) == 1
    assert killed and "launcher.max_failures=0" in capsys.readouterr().err


def test_a_mistake_of_the_users_is_one_sentence_and_not_tried_again(ray, tmp_path, capsys):
    launcher = RayLauncher(num_workers=2, max_failures=3)
    assert launcher.run(planned(tmp_path, "task.ways=99")) == 2
    said = capsys.readouterr().err
    assert said.count("error: ") == 1 and said.count("\n") == 1 and "attempt" not in said


def test_ctrl_c_saves_and_leaves_nothing_behind(tmp_path):
    command = [sys.executable, str(ROOT / "experiments" / "maml.py"), "launcher=ray", *SMALL]
    options = ["trainer.iterations=100000", f"hydra.run.dir={tmp_path}"]
    process = subprocess.Popen(
        [*command, *options], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    deadline = time.monotonic() + 120
    while not (tmp_path / "checkpoints").is_dir() and time.monotonic() < deadline:
        time.sleep(0.1)
    workers = worker_processes(process.pid)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "stopped at iteration" in said and "resume=auto" in said
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{each}").exists() for each in workers) and time.monotonic() < deadline:
        time.sleep(0.1)
    alive = [each for each in workers if _is_alive(each)]
    assert len(workers) == 2 and not alive


def _is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_ray_listens_on_loopback_alone(ray):
    family = {os.getpid()}
    table = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
                table[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
            except OSError:
                continue
    for _ in range(10):
        family |= {child for child, parent in table.items() if parent in family}
    sockets = set()
    for process in family:
        for descriptor in Path(f"/proc/{process}/fd").glob("*"):
            try:
                sockets.add(str(descriptor.readlink()))
            except OSError:
                continue
    listening = []
    for kind in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in sockets:
                listening.append(words[1].split(":")[0])
    loopback = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
    assert listening and set(listening) <= loopback


def test_what_a_worker_said_is_left_for_the_record_of_a_sweeps_job(tmp_path):
    run = replace(planned(tmp_path), in_sweep=True)
    failed = JobFailure(UserError("there are only 12 classes."), in_job=False)
    stopped = JobFailure(Interrupted(signal.SIGINT, "stopped at iteration 3"), in_job=False)
    for each, end in ((replace(run, in_sweep=False), failed), (run, stopped), (run, failed)):
        assert pop_worker_error(tmp_path) == ""
        _leave_last_words(Errand(pickle.dumps(each), None, "", ()), end)
    assert pop_worker_error(tmp_path) == "there are only 12 classes."


def test_only_lost_workers_are_called_lost(capsys):
    from ray.train import ControllerError, WorkerGroupError

    for error, said in (
        (WorkerGroupError("a worker died", {}), "lost once more than launcher.max_failures=4"),
        (ControllerError(RuntimeError("no bucket")), "Ray could not carry the run through"),
    ):
        run = object.__new__(RayRun)
        run._signal, run._max_failures = 0, 4
        run._board = SimpleNamespace(read=lambda topic: [])
        run._fit = SimpleNamespace(error=error)
        assert run.status() == 1
        told = capsys.readouterr().err
        assert said in told and type(error).__name__ in told


def test_an_empty_validation_set_is_refused():
    from metadist.launchers.ray.replica import _two_sets

    assert _two_sets(([1], [2])) == ([1], [2]) and _two_sets(([1], None)) == ([1], None)
    for made in (([1], []), ([], [1]), (None, [1])):
        with pytest.raises(UserError, match="at least one item in each"):
            _two_sets(made)
