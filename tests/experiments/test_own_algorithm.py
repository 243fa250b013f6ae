"""A user-defined algorithm in a module in the current directory."""

import json
import shutil
from pathlib import Path

import pytest
from commands import CommandResult, run_command
from tiny import SMALL, records, without_times

from metadist.config import load_experiment

EXAMPLE = Path(__file__).with_name("own_algorithm.py")
TARGET = "algorithm._target_=my_module.MyAlgorithm"


def run(directory: Path, *overrides: str, size: int = 1) -> list[CommandResult]:
    """Run `experiments/maml.py` with `directory` as the current directory."""
    return run_command("maml.py", *SMALL, *overrides, size=size, directory=directory)


@pytest.fixture
def directory(tmp_path) -> Path:
    shutil.copy(EXAMPLE, tmp_path / "my_module.py")
    return tmp_path


def test_an_algorithm_is_selected_by_its_target(directory):
    results = {}
    for strategy in ("rpc", "allreduce"):
        options = [TARGET, "+algorithm.first_rate=0.4", f"strategy={strategy}"]
        options += ["trainer.iterations=2", "trainer.eval_every=0", f"hydra.run.dir={strategy}"]
        outcomes = run(directory, *options, size=2)
        assert [each.status for each in outcomes] == [0, 0], outcomes[0].err
        results[strategy] = without_times(records(directory / strategy))
    assert results["rpc"] == results["allreduce"]
    written = json.loads((directory / "rpc/results.json").read_text())
    assert written["iterations"] == 2
    assert written["method"]["algorithm"] == "MyAlgorithm"
    assert written["method"]["options"] == {"first_rate": 0.4}


def test_an_algorithm_is_selected_by_a_configuration_file(directory, monkeypatch):
    file = directory / "my_conf/algorithm/mine.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("_target_: my_module.MyAlgorithm\nfirst_rate: 0.4\n")
    options = ["algorithm=mine", "strategy=local", "hydra.run.dir=run", "--config-dir=my_conf"]
    (outcome,) = run(directory, *options)
    assert outcome.status == 0, outcome.err
    assert (directory / "run/results.json").exists()

    # What reads the run later finds its options too, from any directory.
    file = directory / "my_conf/dataset/more.yaml"
    file.parent.mkdir()
    file.write_text("_target_: metadist.tasks.Glyphs\ntrain_classes: 9\n")
    monkeypatch.syspath_prepend(directory)
    x = load_experiment(directory / "run", "dataset=more", "dataset.examples=17", trust_code=True)
    assert len(x.tasks.dataset.splits["train"]) == 9
    assert x.configuration["dataset"]["examples"] == 17


def test_errors_are_one_sentence(directory):
    for overrides, message in (
        ([TARGET, "+algorithm.first_rat=1"], "algorithm.first_rat is not an option of MyAlgorithm"),
        (["algorithm._target_=my_modul.MyAlgorithm"], "my_modul.MyAlgorithm cannot be imported"),
    ):
        (outcome,) = run(directory, *overrides, "strategy=local")
        assert outcome.status == 2
        assert message in outcome.err and len(outcome.err.strip().splitlines()) == 1


def test_an_error_in_it_keeps_its_traceback(directory):
    file = directory / "my_module.py"
    source = file.read_text().replace("self.model(episode", "7 @ self.model(episode")
    number = 1 + next(i for i, line in enumerate(source.splitlines()) if "7 @" in line)
    file.write_text(source)
    ((status, _, text),) = run(directory, TARGET, "strategy=local")
    assert status == 1 and f'my_module.py", line {number}, in forward' in text
    assert text.splitlines()[-1].startswith(f"RuntimeError: my_module.py:{number}, in forward: ")


def test_another_class_is_refused(directory):
    with (directory / "my_module.py").open("a") as file:
        file.write("\n\ndef build(model):\n    return model\n")
    (outcome,) = run(directory, "algorithm._target_=my_module.build", "strategy=local")
    assert outcome.status == 2
    assert "gives a Conv4, which is no metadist.algorithms.Learner: derive" in outcome.err
