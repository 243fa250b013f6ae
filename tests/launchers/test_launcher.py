"""Who starts processes: what is refused before any work, and what a worker is told."""

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from metadist.config import build_experiment
from metadist.errors import UserError
from metadist.launchers import Launcher, PlannedRun, TorchrunLauncher
from metadist.launchers import torchrun as module
from metadist.launchers.launcher import launcher_of
from metadist.launchers.places import Places

CPU = OmegaConf.create({"device": "cpu", "threads": 1})


class Recorder(Launcher):
    """A launcher that starts nothing."""

    def __init__(self, workers: int = 1) -> None:
        self.workers = workers

    def check(self, configuration):
        if self.workers > 3:
            raise UserError("too many")

    def run(self, planned):
        return 0

    def stop(self, number):
        pass


def configured(**options):
    target = f"{Recorder.__module__}.{Recorder.__name__}"
    return OmegaConf.create({"launcher": {"_target_": target, **options}})


def planned(directory: str = "/runs/a b's", **options) -> PlannedRun:
    return PlannedRun(
        script=Path("/somewhere/experiments/maml.py"),
        name="maml",
        directory=Path(directory),
        configuration=OmegaConf.create({"device": "cpu", "threads": 3, **options}),
        overrides=("seed=1", "logger=[jsonl,console]"),
        hydra_words=("hydra.verbose=true",),
        build=build_experiment,
    )


@pytest.fixture(autouse=True)
def _no_world(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)


def test_none_leaves_the_work_to_this_process():
    none = OmegaConf.create({"launcher": {"_target_": "metadist.launchers.NoLauncher"}})
    assert launcher_of(none) is None and launcher_of(OmegaConf.create({})) is None


def test_a_launcher_is_built_and_checked():
    assert launcher_of(configured(workers=2)).workers == 2
    with pytest.raises(UserError, match="too many"):
        launcher_of(configured(workers=4))
    with pytest.raises(UserError, match="no launcher"):
        launcher_of(OmegaConf.create({"launcher": {"_target_": "fractions.Fraction"}}))


def test_a_world_inside_a_world_is_refused_and_says_which_to_drop(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"drop launcher=.* or start .* with python"):
        launcher_of(configured())


def test_more_workers_than_cores_or_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda _: range(4), raising=False)
    TorchrunLauncher(nproc_per_node=4).check(CPU)
    TorchrunLauncher(nproc_per_node=9, oversubscribe=True).check(CPU)
    for options, words in (
        ({"nproc_per_node": 5}, "nproc_per_node=5 .* 4 cores"),
        ({"nproc_per_node": 2, "jobs": 3}, "jobs=3 .* 4 cores"),
        ({"nnodes": 2}, "rdzv_endpoint"),
        ({"nnodes": 2, "node_rank": 2, "rdzv_endpoint": "a:1"}, "node_rank=2"),
    ):
        with pytest.raises(UserError, match=words):
            TorchrunLauncher(**options).check(CPU)
    assert TorchrunLauncher(nproc_per_node=2).jobs_at_once(CPU) == 2
    assert TorchrunLauncher(nproc_per_node=3).jobs_at_once(CPU) == 1
    assert TorchrunLauncher(jobs=7).jobs_at_once(CPU) == 7

    monkeypatch.setattr(module.torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,7")
    auto = OmegaConf.create({"device": "auto"})
    with pytest.raises(UserError, match="3 GPUs"):
        TorchrunLauncher(nproc_per_node=4).check(auto)


def test_jobs_at_a_time_have_gpus_of_their_own(monkeypatch):
    monkeypatch.setattr(module.torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,7,9")
    launcher = TorchrunLauncher(nproc_per_node=2)
    run = planned(device="auto")
    seen = [launcher._environment(run, place)["CUDA_VISIBLE_DEVICES"] for place in range(2)]
    assert seen == ["3,5", "7,9"]
    assert launcher._environment(planned(), 0)["CUDA_VISIBLE_DEVICES"] == "3,5,7,9"


def test_places_are_the_lowest_that_are_free():
    places = Places()
    with places.one() as first, places.one() as second:
        assert (first, second) == (0, 1)
    with places.one() as again:
        assert again == 0


def test_a_worker_gets_the_same_words_and_the_directory():
    run = pickle.loads(pickle.dumps(planned(resume="auto")))
    words = run.words()
    assert words[:3] == ["hydra.verbose=true", "seed=1", "logger=[jsonl,console]"]
    assert {"launcher=none", "hydra.mode=RUN", "resume=auto"} <= set(words)
    (directory,) = [word for word in words if word.startswith("hydra.run.dir=")]
    assert OverridesParser.create().parse_override(directory).value() == "/runs/a b's"
    command = TorchrunLauncher(nproc_per_node=2, max_restarts=1).command(run)
    assert {"--standalone", "--nproc-per-node=2", "--max-restarts=1"} <= set(command)
    nodes = TorchrunLauncher(nnodes=2, node_rank=1, rdzv_endpoint="a:1").command(run)
    assert {"--nnodes=2", "--node-rank=1", "--rdzv-endpoint=a:1"} <= set(nodes)


def test_torchruns_status_tells_and_its_report_is_left_out(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import sys; print('said', file=sys.stderr); sys.exit(2)")
    agent = subprocess.Popen(
        [sys.executable, "-m", "metadist.distributed.torchrun", "--standalone", str(script)],
        stdin=subprocess.PIPE,  # its end would be the word to stop
        stderr=subprocess.PIPE,
        text=True,
    )
    assert agent.wait(60) == 2
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
        monkeypatch.setattr(launcher, "_environment", late)
    assert launcher.run(planned(str(tmp_path))) == 143
