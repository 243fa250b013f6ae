"""The wheel: its files, and its commands in a directory outside of the repository."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from tiny import SMALL

from metadist import __version__

ROOT = Path(__file__).resolve().parent.parent
BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"


def built_wheel(folder: Path) -> Path:
    """Build a wheel from a copy of the sources: a build leaves files beside them."""
    source = folder / "source"
    source.mkdir()
    for name in ("metadist", "conf"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-c", BUILD, str(folder)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=600)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return built_wheel(tmp_path_factory.mktemp("wheel"))


def test_the_wheel_has_the_packages_and_their_data(wheel):
    assert wheel.name.startswith(f"metadist-{__version__}-")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        (entry_points,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        assert "metadist = metadist.cli.command:main" in archive.read(entry_points).decode()
    files = [path for path in (ROOT / "metadist").rglob("*") if path.is_file()]
    files += [ROOT / "metadist" / path.relative_to(ROOT) for path in (ROOT / "conf").rglob("*.*")]
    expected = {str(path.relative_to(ROOT)) for path in files if "__pycache__" not in path.parts}
    assert names == expected
    assert "metadist/py.typed" in names and "metadist/conf/maml.yaml" in names
    templates = [name for name in names if name.startswith("metadist/reports/templates/")]
    assert len(templates) == 6 and "metadist/reports/published.yaml" in names


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """A folder in which the wheel is installed."""
    target = tmp_path_factory.mktemp("installed")
    options = ["--quiet", "--no-deps", "--no-index", "--target", str(target)]
    command = [sys.executable, "-m", "pip", "install", *options, str(wheel)]
    subprocess.run(command, check=True, timeout=600)
    return target


@pytest.fixture
def run(installed, tmp_path):
    """Run a command in an empty directory, where the installed package alone can be imported."""

    def call(*command: str, cwd: Path = tmp_path) -> subprocess.CompletedProcess[str]:
        path = f"{installed / 'bin'}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}"
        variables = {"PYTHONPATH": str(installed), "PATH": path + os.environ["PATH"]}
        outcome = subprocess.run(
            command,
            cwd=cwd,
            env={**os.environ, **variables, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert outcome.returncode == 0, outcome.stdout + outcome.stderr
        return outcome

    return call


def results(directory: Path) -> dict:
    return json.loads((directory / "results.json").read_text(encoding="utf-8"))


@pytest.mark.slow
def test_the_installed_package_is_not_the_repository(installed, run):
    program = "import metadist.conf; print(metadist.conf.__file__)"
    assert run(sys.executable, "-c", program).stdout.startswith(str(installed))


@pytest.mark.slow
@pytest.mark.parametrize("program", ["metadist", "python", "torchrun"])
def test_an_experiment_trains(run, tmp_path, program):
    command = {
        "metadist": ["metadist"],
        "python": [sys.executable, "-m", "metadist"],
        "torchrun": ["torchrun", "--standalone", "--nproc_per_node=2", "-m", "metadist"],
    }[program]
    run(*command, "maml", *SMALL, "hydra.run.dir=run")
    found = results(tmp_path / "run")
    assert found["iterations"] == 4
    assert found["world_size"] == (2 if program == "torchrun" else 1)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["none", "torchrun"])
def test_a_sweep_with_a_configuration_directory(run, tmp_path, launcher):
    option = tmp_path / "mine" / "algorithm" / "slow.yaml"
    option.parent.mkdir(parents=True)
    option.write_text("defaults: [maml]\ninner_lr: 0.01\n")
    options = ["algorithm=slow,maml", f"launcher={launcher}", "hydra.sweep.dir=sweep"]
    run("metadist", "maml", "--config-dir=mine", "-m", *SMALL, *options)
    rates = [results(tmp_path / "sweep" / job)["method"]["options"]["inner_lr"] for job in "01"]
    assert rates == [0.01, 0.4]
    (tmp_path / "sweep" / "sweep.md").unlink()
    assert "2 runs finished" in run("metadist", "report", "sweep").stdout
    assert (tmp_path / "sweep" / "sweep.md").exists()


@pytest.mark.slow
def test_an_application_with_its_own_configuration_and_group(run, tmp_path):
    (tmp_path / "conf" / "shift").mkdir(parents=True)
    (tmp_path / "conf" / "shift" / "small.yaml").write_text(
        "_target_: metadist.tasks.Augment\ncrop_padding: 1\n"
    )
    (tmp_path / "conf" / "application.yaml").write_text(
        "defaults: [maml, {shift: small}, _self_]\n"
        "hydra:\n  searchpath: ['pkg://metadist.conf']\n"
        "dataset:\n  augment: ${shift}\n"
    )
    (tmp_path / "application.py").write_text(
        "from pathlib import Path\n"
        "from metadist.cli import hydra_main\n"
        "main = hydra_main('application', str(Path(__file__).resolve().parent / 'conf'))\n"
        "if __name__ == '__main__':\n    main()\n"
    )
    for launcher in ("none", "torchrun"):
        options = [f"launcher={launcher}", f"hydra.run.dir={launcher}"]
        run(sys.executable, "application.py", *SMALL, *options)
        assert results(tmp_path / launcher)["iterations"] == 4
        assert "augment: ${shift}" in (tmp_path / launcher / ".hydra/config.yaml").read_text()


@pytest.mark.slow
def test_a_project_of_init_passes_its_tests_and_its_readme_runs(run, tmp_path):
    run("metadist", "init", "demo")
    project = tmp_path / "demo"
    (block,) = re.findall(r"```bash\n(.*?)```", (project / "README.md").read_text(), re.DOTALL)
    commands = [shlex.split(line) for line in block.splitlines()]
    programs = [command[0] for command in commands]
    assert programs == ["metadist", "torchrun", "metadist", "python", "metadist", "metadist"]
    for command in commands:
        few = ["trainer.iterations=4", "trainer.eval_tasks=20"] if "maml" in command else []
        if "outputs/maml/RUN" in command:
            (newest, *_) = sorted(project.glob("outputs/maml/*"))
            path = str(newest.relative_to(project))
            command = [path if each == "outputs/maml/RUN" else each for each in command]
        run(*command, *few, cwd=project)
    assert list(project.glob("outputs/maml/*/evaluations/*.json"))
    assert len(list(project.glob("outputs/maml/*/results.json"))) == 2
    assert len(list(project.glob("multirun/maml/*/*/results.json"))) == 2
