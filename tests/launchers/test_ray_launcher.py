"""launcher=ray: the results of any launcher, checkpoints in Ray's storage, lost workers."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("ray")

from commands import ROOT
from omegaconf import OmegaConf
from ray_workers import is_alive, planned, signal_a_worker_once, worker_processes
from test_layers import imported
from tiny import SMALL, compose, records, run_results, train, without_times
from worlds import run_world

from metadist.distributed.world import usable_cpus
from metadist.errors import UserError
from metadist.launchers import RunSpec
from metadist.launchers.ray import ray_launcher
from metadist.launchers.ray.cluster import reserve_port
from metadist.launchers.ray.ray_launcher import RayLauncher
from metadist.reports import pop_worker_error

pytestmark = pytest.mark.slow  # `make test-slow` installs Ray

LONGER = ("trainer.iterations=40", "trainer.eval_every=10", "trainer.checkpoint_every=5")


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def results(directory: Path) -> dict:
    found = run_results(directory)
    changing = ("tasks_per_second", "wall_seconds", "evaluation_seconds", "environment")
    return {k: v for k, v in found.items() if k not in changing}


def equal_runs(one: Path, other: Path) -> None:
    """Bit for bit: every metric of every iteration, and the test."""
    assert without_times(records(one)) == without_times(records(other))
    assert results(one) == results(other)


def test_without_ray_the_error_has_the_pip_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"Ray is not installed.*pip install -e '\.\[ray\]'"):
        RayLauncher().check({})


def test_more_workers_than_cpus_are_refused_before_ray_starts(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(UserError, match=r"launcher\.num_workers=\d+ .* this machine has \d+"):
        RayLauncher(num_workers=usable_cpus() + 1).check({})


def test_the_shared_state_ends_after_an_error_too(monkeypatch, tmp_path):
    closed = []

    class FailingRun:
        def __init__(self, spec, **options) -> None:
            pass

        def wait(self, seconds: float) -> bool:
            raise RuntimeError("the head node is gone")

        def close(self) -> None:
            closed.append(self)

    monkeypatch.setattr(ray_launcher, "TrainRun", FailingRun)
    monkeypatch.setattr(ray_launcher, "init_ray", lambda address: None)
    with pytest.raises(RuntimeError, match="head node"):
        RayLauncher(use_gpu=False).run(RunSpec("maml", tmp_path, compose(*SMALL), ()))
    assert len(closed) == 1


def test_a_missing_cluster_is_one_sentence_soon(free_port):
    with pytest.raises(UserError, match=r"there is no Ray cluster at 127\.0\.0\.1:"):
        RayLauncher(address=f"127.0.0.1:{free_port}").check({})


def test_only_one_package_imports_ray():
    """Only launchers/ray imports Ray, and nothing else imports launchers/ray."""
    for path in (ROOT / "metadist").rglob("*.py"):
        if path.parent != ROOT / "metadist" / "launchers" / "ray":
            rays = re.compile(r"(metadist\.launchers\.)?ray\b")
            assert not [name for name in imported(path) if rays.match(name)], path


def test_a_run_in_ray_workers_is_that_of_any_other_world(ray, tmp_path, capsys):
    assert RayLauncher(num_workers=2).run(planned(tmp_path / "ray", "logger=console")) == 0
    output = capsys.readouterr().out
    deadline = time.monotonic() + 10  # Ray forwards output asynchronously
    while "test accuracy" not in output and time.monotonic() < deadline:
        time.sleep(0.1)
        output += capsys.readouterr().out
    assert "rpc on 2 workers" in output and "test accuracy" in output
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
    override = f"strategy={strategy}"
    assert RayLauncher(num_workers=size).run(planned(tmp_path / "ray", override)) == 0
    run_world(train, size, str(tmp_path / "other"), override)
    equal_runs(tmp_path / "ray", tmp_path / "other")


@pytest.mark.parametrize("strategy", ["rpc", "allreduce"])
def test_a_killed_worker_changes_nothing(ray, tmp_path, strategy, capsys):
    override, directory = f"strategy={strategy}", tmp_path / "ray"
    killed = signal_a_worker_once(lambda: (directory / "checkpoints").is_dir())
    assert RayLauncher(num_workers=2).run(planned(directory, override, *LONGER)) == 0
    assert killed and "attempt 2 of the run" in capsys.readouterr().err
    run_world(train, 2, str(tmp_path / "other"), override, *LONGER)
    equal_runs(directory, tmp_path / "other")


def test_too_many_lost_workers_end_the_run(ray, tmp_path, capsys):
    killed = signal_a_worker_once(lambda: (tmp_path / "checkpoints").is_dir())
    launcher = RayLauncher(num_workers=2, max_failures=0)
    assert launcher.run(planned(tmp_path, "trainer.iterations=4000")) == 1
    assert killed and "launcher.max_failures=0" in capsys.readouterr().err


def test_a_user_error_is_one_sentence_and_not_retried(ray, tmp_path, capsys):
    launcher = RayLauncher(num_workers=2, max_failures=3)
    assert launcher.run(planned(tmp_path, "task.ways=99")) == 2
    output = capsys.readouterr().err
    assert output.count("error: ") == 1 and output.count("\n") == 1 and "attempt 2" not in output


def test_a_run_directory_that_is_not_shared_is_refused_at_once(ray, tmp_path, capsys):
    run = planned(tmp_path / "run")
    run.directory.rmdir()  # as on another node; Ray's storage is elsewhere
    launcher = RayLauncher(num_workers=2, storage_path=str(tmp_path / "storage"))
    assert launcher.run(run) == 2
    output = capsys.readouterr().err
    assert output.count("error: ") == 1 and "a file system that all nodes share" in output
    assert not run.directory.exists()


def test_a_run_that_waits_for_a_lost_node_says_so_once(ray, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(ray_launcher, "_RESOURCES_TIMEOUT", 0.0)
    monkeypatch.setattr(ray_launcher, "_RESOURCES_INTERVAL", 0.0)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 1.0})
    assert RayLauncher(num_workers=2, use_gpu=False).run(planned(tmp_path)) == 0
    output = capsys.readouterr().err
    assert output.count("waiting for the Ray cluster: it has 1 CPU, and the run needs 2") == 1


def test_a_programming_error_in_a_collective_is_not_retried(ray, tmp_path, capsys):
    target = "strategy._target_=broken_parts.GroupForGpus"
    launcher = RayLauncher(num_workers=2, max_failures=3)
    assert launcher.run(planned(tmp_path, "strategy=allreduce", target)) == 1
    output = capsys.readouterr().err
    assert "No backend type associated with device type cpu" in output
    assert output.count("error: ") == 1 and "attempt 2" not in output and "lost" not in output


def test_hydras_values_are_those_of_the_command(tmp_path):
    own = ["strategy=local", "launcher.num_workers=1", "seed=${hydra:job.env_set.SEED}"]
    own += ["+hydra.job.env_set={SEED:3,POLICY:skip}", "trainer.on_non_finite=${oc.env:POLICY}"]
    command = [sys.executable, str(ROOT / "experiments" / "maml.py"), "launcher=ray", *SMALL]
    ended = subprocess.run(
        [*command, *own, f"hydra.run.dir={tmp_path}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended
    saved = OmegaConf.load(tmp_path / ".hydra" / "config.yaml")
    assert (int(saved.seed), saved.trainer.on_non_finite) == (3, "skip")
    assert run_results(tmp_path)["seed"] == 3


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
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 130, output
    assert "stopped at iteration" in output and "resume=auto" in output
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{each}").exists() for each in workers) and time.monotonic() < deadline:
        time.sleep(0.1)
    alive = [each for each in workers if is_alive(each)]
    assert len(workers) == 2 and not alive


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
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                listening.append(fields[1].split(":")[0])
    loopback = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
    assert listening and set(listening) <= loopback


JOIN = """
import os, ray
ray.init(address=os.environ["ADDRESS"], logging_level=50)
print(ray.cluster_resources()["CPU"] > 0)
"""


@pytest.mark.parametrize("knows_token", [True, False])
def test_a_local_node_is_joined_with_its_token_alone(ray, tmp_path, knows_token):
    address = ray.get_runtime_context().gcs_address
    environment = os.environ | {"ADDRESS": address, "HOME": str(tmp_path)}
    if not knows_token:
        environment["RAY_AUTH_TOKEN"] = "ab" * 32
    joined = subprocess.run(
        [sys.executable, "-c", JOIN], env=environment, capture_output=True, text=True, timeout=120
    )
    assert (joined.returncode == 0 and joined.stdout == "True\n") == knows_token, joined.stderr
    assert not (tmp_path / ".ray" / "auth_token").exists()


def test_the_error_of_a_sweeps_job_is_left_for_its_record(ray, tmp_path):
    launcher = RayLauncher(num_workers=1)
    for in_sweep in (False, True):
        run = planned(tmp_path / str(in_sweep), "task.ways=99", "strategy=local")
        assert launcher.run(replace(run, in_sweep=in_sweep)) == 2
        assert pop_worker_error(run.directory).startswith("task.ways is 99") == in_sweep


def test_a_concurrent_run_writes_its_output_to_a_file(ray, tmp_path, capfd):
    run = planned(tmp_path, "logger=console", "strategy=local")
    assert RayLauncher(num_workers=1).run(replace(run, concurrent=True)) == 0
    assert "test accuracy" in (tmp_path / "console.log").read_text(encoding="utf-8")
    time.sleep(1)
    assert "accuracy" not in capfd.readouterr().out


def test_an_error_of_ray_train_itself_is_not_called_a_lost_worker(ray, tmp_path, capsys):
    launcher = RayLauncher(num_workers=1, storage_path="/proc/not-writable")
    assert launcher.run(planned(tmp_path)) == 1
    error = capsys.readouterr().err
    assert "error: Ray Train failed" in error and "lost" not in error


def test_a_reserved_port_is_free_for_the_store_alone():
    port = reserve_port()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    with socket.create_server(("127.0.0.1", port)):  # it sets SO_REUSEADDR, as a TCPStore does
        pass


def test_an_empty_validation_set_is_refused():
    from metadist.launchers.ray.replica import check_datasets

    assert check_datasets(([1], [2])) == ([1], [2])
    assert check_datasets(([1], None)) == ([1], None)
    for made in (([1], []), ([], [1]), (None, [1])):
        with pytest.raises(UserError, match="at least one item in each"):
            check_datasets(made)
