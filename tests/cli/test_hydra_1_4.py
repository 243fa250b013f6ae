"""The commands with Hydra's release candidate 1.4, in an environment of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ROOT
from tiny import SMALL, run_results

CANDIDATES = ["hydra-core==1.4.0rc3", "omegaconf==2.4.1rc1", "hydra-optuna-sweeper==1.4.0rc3"]
OTHERS = ["optuna>=4.9,<6", "alembic", "sqlalchemy", "colorlog", "mako"]
QUICK = [*SMALL, "trainer.iterations=2", "trainer.eval_tasks=3", "trainer.checkpoint_every=1"]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """A folder with the release candidates, which comes first on the module path."""
    folder = tmp_path_factory.mktemp("hydra_1_4")
    # Without dependencies: NumPy and PyYAML are those of this environment.
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder)]
    done = subprocess.run([*install, *CANDIDATES, *OTHERS], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"the release candidate cannot be installed: {done.stderr[-300:]}")
    return folder


def run(packages: Path, *arguments: str) -> subprocess.CompletedProcess:
    environment = {
        **os.environ,
        "PYTHONPATH": f"{packages}{os.pathsep}{ROOT}",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def results(directory: Path) -> dict:
    return run_results(directory)


def test_the_release_candidate_is_used(packages):
    text = "import hydra, omegaconf; print(hydra.__version__, omegaconf.__version__)"
    assert run(packages, "-c", text).stdout.split() == ["1.4.0rc3", "2.4.1rc1"]


@pytest.mark.parametrize("script", ["maml", "ddp"])
@pytest.mark.parametrize("strategy", ["local", "allreduce"])
def test_a_run_has_the_losses_of_this_version(packages, tmp_path, script, strategy):
    options = [f"experiments/{script}.py", f"strategy={strategy}", *QUICK]
    options = [each for each in options if script == "maml" or not each.startswith("task.")]
    found = run(packages, *options, f"hydra.run.dir={tmp_path / 'new'}")
    assert found.returncode == 0, found.stderr
    assert "register_new_resolver" not in found.stderr and "version_base" not in found.stderr
    this = run(ROOT, *options, f"hydra.run.dir={tmp_path / 'this'}")
    assert this.returncode == 0, this.stderr
    assert results(tmp_path / "new")["train_loss"] == results(tmp_path / "this")["train_loss"]


def test_launched_by_torchrun_with_a_preset(packages, tmp_path):
    options = ["+experiment=maml_sinusoid", "scheduler=cosine", "trainer.iterations=2"]
    options += ["launcher=torchrun", "launcher.nproc_per_node=2", "launcher.oversubscribe=true"]
    options += ["trainer.eval_tasks=3", "trainer.validation_tasks=2", "+partition=dim0"]
    found = run(packages, "experiments/maml.py", *options, f"hydra.run.dir={tmp_path}")
    assert found.returncode == 0, found.stderr
    assert results(tmp_path)["world_size"] == 2


def test_a_sweep(packages, tmp_path):
    options = ["strategy=local", *QUICK, "seed=0,1", f"hydra.sweep.dir={tmp_path}"]
    found = run(packages, "experiments/maml.py", "-m", *options)
    assert found.returncode == 0, found.stderr
    assert [results(tmp_path / str(job))["seed"] for job in (0, 1)] == [0, 1]


def test_a_sweep_with_optuna(packages, tmp_path):
    options = ["strategy=local", *QUICK, "hydra/sweeper=optuna", "hydra.sweeper.n_trials=2"]
    options += ["hydra/sweeper/sampler=random", "hydra.sweeper.n_jobs=1"]
    options += ["hydra.sweeper.direction=maximize", "optimizer.lr=interval(1e-4,1e-2)"]
    found = run(packages, "experiments/maml.py", "-m", *options, f"hydra.sweep.dir={tmp_path}")
    assert found.returncode == 0, found.stderr
    assert "best_value" in (tmp_path / "optimization_results.yaml").read_text()
    assert results(tmp_path / "1")["iterations"] == 2


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.iteratons=3", "did you mean iterations?"),
        ("dataset=omniglott", "did you mean omniglot?"),
        ("logger=[tensorbord]", "did you mean tensorboard?"),
        ("optimiser=sgd", "did you mean optimizer?"),
        ("seed=[", "cannot be read"),
    ],
)
def test_refusals_are_one_sentence(packages, tmp_path, override, message):
    found = run(packages, "experiments/maml.py", override, f"hydra.run.dir={tmp_path / 'run'}")
    errors = [line for line in found.stderr.splitlines() if line.startswith("error: ")]
    assert found.returncode == 2 and len(errors) == 1 and message in errors[0], found.stderr
