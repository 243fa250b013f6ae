"""Launchers: checks of their options, and what the workers are started with."""

import contextlib
import io
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import hydra
import pytest
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf
from tiny import CONF

from metadist.errors import UserError
from metadist.launchers import Launcher, RunSpec, gpu_slots
from metadist.launchers import torchrun as module
from metadist.launchers.launcher import create_launcher
from metadist.launchers.torchrun import TorchrunLauncher

CPU = OmegaConf.create({"device": "cpu", "threads": 1})


class Recorder(Launcher):
    """A launcher that starts nothing."""

    def __init__(self, workers: int = 1) -> None:
        self.workers = workers

    def check(self, configuration):
        if self.workers > 3:
            raise UserError("too many")

    def run(self, spec):
        return 0

    def stop(self, number):
        pass


def configured(**options):
    target = f"{Recorder.__module__}.{Recorder.__name__}"
    return OmegaConf.create({"launcher": {"_target_": target, **options}})


def spec_of(directory: str = "/runs/a b's", **options) -> RunSpec:
    configuration = OmegaConf.create({"device": "cpu", "threads": 3, **options})
    return RunSpec("maml", Path(directory), configuration, ("seed=1",))


@pytest.fixture(autouse=True)
def _no_world(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)


def test_none_leaves_the_work_to_this_process():
    none = OmegaConf.create({"launcher": {"_target_": "metadist.launchers.NoLauncher"}})
    assert create_launcher(none) is None and create_launcher(OmegaConf.create({})) is None


def test_a_launcher_is_built_and_checked():
    assert create_launcher(configured(workers=2)).workers == 2
    with pytest.raises(UserError, match="too many"):
        create_launcher(configured(workers=4))
    with pytest.raises(UserError, match="not a Launcher"):
        create_launcher(OmegaConf.create({"launcher": {"_target_": "fractions.Fraction"}}))


def test_a_launcher_inside_torchrun_is_refused_with_the_remedy(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"drop launcher=.* or start .* with python"):
        create_launcher(configured())


@pytest.mark.parametrize(
    ("mode", "directory", "key"),
    [
        ("RUN", "run.dir", None),
        ("RUN", None, "hydra.run.dir"),
        ("MULTIRUN", "sweep.dir", None),
        ("MULTIRUN", "run.dir", "hydra.sweep.dir"),
    ],
)
def test_several_nodes_need_one_directory(monkeypatch, mode, directory, key):
    overrides = [f"hydra.mode={mode}", *([f"hydra.{directory}=shared"] if directory else [])]
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        configuration = hydra.compose("maml", overrides, return_hydra_config=True)
    monkeypatch.setattr(HydraConfig.instance(), "cfg", configuration)
    launcher = TorchrunLauncher(nproc_per_node=1, nnodes=2, rdzv_endpoint="a:1")
    refused = pytest.raises(UserError, match=f"give {key}=DIR, the same on all nodes")
    with refused if key else contextlib.nullcontext():
        launcher.check(CPU)


def test_more_workers_than_cores_or_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda _: range(4), raising=False)
    TorchrunLauncher(nproc_per_node=4).check(CPU)
    TorchrunLauncher(nproc_per_node=9, oversubscribe=True).check(CPU)
    TorchrunLauncher(nproc_per_node=2, jobs=2).check(CPU)
    TorchrunLauncher(nproc_per_node=2, jobs=3, oversubscribe=True).check(CPU)
    TorchrunLauncher(nnodes=2, node_rank=1, rdzv_endpoint="a:1", jobs=1).check(CPU)
    for options, message in (
        ({"nproc_per_node": 5}, "nproc_per_node=5 .* 4 cores"),
        ({"nproc_per_node": 2, "jobs": 3}, "jobs=3 .* 4 cores"),
        ({"nnodes": 2}, "rdzv_endpoint"),
        ({"nnodes": 2, "node_rank": 2, "rdzv_endpoint": "a:1"}, "node_rank=2"),
        ({"nnodes": 2, "rdzv_endpoint": "a:1", "jobs": 2}, "must be 1 with several nodes"),
    ):
        with pytest.raises(UserError, match=message):
            TorchrunLauncher(**options).check(CPU)
    assert TorchrunLauncher(nproc_per_node=2).max_concurrent_jobs(CPU) == 2
    assert TorchrunLauncher(nproc_per_node=3).max_concurrent_jobs(CPU) == 1
    assert TorchrunLauncher(nproc_per_node=9, oversubscribe=True).max_concurrent_jobs(CPU) == 1
    assert TorchrunLauncher(jobs=7).max_concurrent_jobs(CPU) == 7
    nodes = TorchrunLauncher(nproc_per_node=1, nnodes=2, rdzv_endpoint="a:1")
    assert nodes.max_concurrent_jobs(CPU) == 1

    monkeypatch.setattr(module.torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,7")
    auto = OmegaConf.create({"device": "auto"})
    with pytest.raises(UserError, match="3 GPUs"):
        TorchrunLauncher(nproc_per_node=4).check(auto)


def test_concurrent_jobs_have_gpus_of_their_own(monkeypatch):
    monkeypatch.setattr(module.torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,7,9")
    launcher = TorchrunLauncher(nproc_per_node=2)
    spec = spec_of(device="auto")
    seen = [launcher.environment(spec, slot)["CUDA_VISIBLE_DEVICES"] for slot in range(2)]
    assert seen == ["3,5", "7,9"]
    assert launcher.environment(spec_of(), 0)["CUDA_VISIBLE_DEVICES"] == "3,5,7,9"


def test_a_running_job_keeps_its_gpus_from_another_process(tmp_path, monkeypatch):
    monkeypatch.setattr(module.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_slots.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,7,9")
    launcher, spec, taken = TorchrunLauncher(nproc_per_node=2), spec_of(str(tmp_path)), []
    spec.configuration.device = "auto"

    def take() -> None:
        with contextlib.ExitStack() as stack:
            taken.append(gpu_slots.acquire_slot([["3", "5"], ["7", "9"]], stack))

    agent = RecordedAgent(0, take)
    monkeypatch.setattr(module.subprocess, "Popen", agent)
    launcher.run(spec)
    take()
    assert agent.options["env"]["CUDA_VISIBLE_DEVICES"] == "3,5" and taken == [1, 0]


@pytest.mark.parametrize(
    ("device", "visible", "expected"),
    [
        ("auto", "5,,3", ["5", "3"]),
        ("cuda", "", ["0", "1"]),
        ("cuda", None, ["0", "1"]),
        ("cuda:1", "0,1", []),
        ("cpu", "0,1", []),
    ],
)
def test_which_gpus_jobs_are_distributed_over(monkeypatch, device, visible, expected):
    monkeypatch.setattr(module.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(module.torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert module.visible_gpus(OmegaConf.create({"device": device})) == expected
    # A job beside which there are too few GPUs left has those of the machine.
    environment = TorchrunLauncher(nproc_per_node=2).environment(spec_of(device=device), 1)
    assert environment.get("CUDA_VISIBLE_DEVICES") == visible


def test_torchrun_gets_its_options_and_the_specification():
    command = TorchrunLauncher(nproc_per_node=2, max_restarts=1).command(
        spec_of(), Path("a b.yaml"), Path("scratch/file")
    )
    assert {"--nnodes=1", "--nproc-per-node=2", "--max-restarts=1"} <= set(command)
    assert "--log-dir=scratch" in command  # which is removed after the job
    assert command[-3:] == ["-m", "metadist.launchers.worker", "a b.yaml"]
    nodes = TorchrunLauncher(nnodes=2, node_rank=1, rdzv_endpoint="a:1")
    command = nodes.command(spec_of(), Path("spec.yaml"), Path("file"))
    assert {"--nnodes=2", "--node-rank=1", "--rdzv-endpoint=a:1"} <= set(command)
    assert "--rdzv-id=metadist-a b's" in command  # jobs of a sweep have rendezvous of their own
    nodes = TorchrunLauncher(nnodes=2, rdzv_endpoint="a:1", rdzv_id=7)
    command = nodes.command(spec_of(), Path("spec.yaml"), Path("file"))
    assert "--rdzv-id=7-a b's" in command and "node-rank" not in str(command)


def test_defaults_of_torchrun_in_the_environment_do_not_count(monkeypatch):
    monkeypatch.setenv("PET_STANDALONE", "1")
    assert not any(name.startswith("PET_") for name in TorchrunLauncher().environment(spec_of(), 0))


def test_the_specification_is_the_users_alone_and_is_removed(tmp_path, monkeypatch):
    seen = []

    class Agent:
        """Ends at once, after a look at the file of the specification."""

        def __init__(self, command, **_):
            path = Path(command[-1])
            spec = RunSpec.from_yaml(path.read_text(encoding="utf-8"))
            seen.append((path.parent, path.stat().st_mode & 0o777, spec.launched, spec.overrides))
            self.stdin = (tmp_path / "stdin").open("w")

        def wait(self):
            return 0

    monkeypatch.setattr(module.subprocess, "Popen", Agent)
    assert TorchrunLauncher().run(replace(spec_of(str(tmp_path)), in_sweep=True)) == 0
    assert seen == [(tmp_path, 0o600, True, ("seed=1",))]
    assert [path.name for path in tmp_path.iterdir()] == ["stdin"]


class RecordedAgent:
    """A process of torchrun's, without the process."""

    def __init__(self, status: int, on_wait) -> None:
        self.status, self.on_wait, self.signals = status, on_wait, []
        self.stdin = io.BytesIO()
        self.options: dict = {}

    def __call__(self, command, **options):
        self.options = options
        return self

    def wait(self):
        self.on_wait()
        return self.status

    def send_signal(self, number):
        self.signals.append(number)


@pytest.mark.parametrize(("status", "expected"), [(0, 0), (2, 2), (1, 1), (143, 143), (-9, 1)])
def test_the_exit_status_of_a_job(tmp_path, monkeypatch, status, expected):
    agent = RecordedAgent(status, lambda: None)
    monkeypatch.setattr(module.subprocess, "Popen", agent)
    assert TorchrunLauncher().run(spec_of(str(tmp_path))) == expected
    assert agent.stdin.closed and agent.options["start_new_session"]
    assert agent.options["stdout"] is None


def test_a_job_beside_others_prints_to_a_file(tmp_path, monkeypatch):
    agent = RecordedAgent(0, lambda: agent.options["stdout"].write(b"said\n"))
    monkeypatch.setattr(module.subprocess, "Popen", agent)
    for _ in range(2):
        TorchrunLauncher().run(replace(spec_of(str(tmp_path)), concurrent=True))
    assert (tmp_path / "console.log").read_text() == "said\nsaid\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_the_running_agents_as_sigterm(tmp_path, monkeypatch, number):
    launcher = TorchrunLauncher()
    agent = RecordedAgent(143, lambda: launcher.stop(number))
    monkeypatch.setattr(module.subprocess, "Popen", agent)
    assert launcher.run(spec_of(str(tmp_path))) == 143
    assert agent.signals == [signal.SIGTERM]
    launcher.stop(number)  # it has ended
    assert agent.signals == [signal.SIGTERM]


def test_the_environment_of_the_workers(monkeypatch, tmp_path):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("METADIST_ERROR_FILE", raising=False)
    spec = spec_of(str(tmp_path))
    environment = TorchrunLauncher().environment(spec, 0)
    assert environment["OMP_NUM_THREADS"] == "3" and environment["PYTHONSAFEPATH"] == "1"
    assert "METADIST_ERROR_FILE" not in environment
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    environment = TorchrunLauncher().environment(replace(spec, in_sweep=True), 0)
    assert environment["OMP_NUM_THREADS"] == "5"
    assert environment["METADIST_ERROR_FILE"] == str(tmp_path / "worker_error.txt")


LISTENING = """
import contextlib, os, sys
from pathlib import Path

files = set()
for descriptor in Path(f"/proc/{os.getppid()}/fd").iterdir():
    with contextlib.suppress(OSError):
        files.add(os.readlink(descriptor))
print("of the agent:", len(files) > 0, flush=True)
for table in ("tcp", "tcp6"):
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
            row = line.split()
            if row[3] == "0A" and f"socket:[{row[9]}]" in files:
                print(row[1])
print("said", file=sys.stderr)
sys.exit(2)
"""


def test_the_agent_of_one_node_opens_no_port_and_its_report_is_left_out(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(LISTENING)
    launcher, spec = TorchrunLauncher(nproc_per_node=1), spec_of()
    command = launcher.command(spec, Path("spec.yaml"), tmp_path / "rendezvous")
    agent = subprocess.Popen(
        [*command[:-3], str(script)],
        env=launcher.environment(spec, 0),
        stdin=subprocess.PIPE,  # its end would stop the job
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert agent.wait(60) == 2
    assert agent.stdout.read() == "of the agent: True\n"
    assert agent.stderr.read().strip() == "said"


@pytest.mark.parametrize("when", ["before", "while it starts"])
def test_a_run_that_is_stopped_before_its_agent_is_there_does_not_begin(
    tmp_path, monkeypatch, when
):
    launcher = TorchrunLauncher()
    monkeypatch.setattr(module.subprocess, "Popen", lambda *_, **__: pytest.fail("it began"))
    if when == "before":
        launcher.stop(2)
    else:
        late = lambda *_: launcher.stop(2) or {}  # noqa: E731
        monkeypatch.setattr(launcher, "environment", late)
    assert launcher.run(spec_of(str(tmp_path))) == 143
