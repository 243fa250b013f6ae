"""`metadist evaluate`: a trained run under another protocol."""

import json
import statistics
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tiny import SMALL, compose
from worlds import run_world

from metadist.cli import evaluate
from metadist.cli.command import exit_status
from metadist.cli.evaluate import evaluate_run, load_for_tasks, main, summary
from metadist.config import load_experiment
from metadist.errors import UserError
from metadist.launchers import RunSpec, run_job
from metadist.reports import read_test_predictions
from metadist.training import export_weights, saved_state
from metadist.training.checkpoints import Checkpoints


def trained(directory: Path, *overrides: str) -> Path:
    directory.mkdir()
    configuration = compose(*SMALL, "strategy=local", *overrides)
    run_world(run_job, 1, RunSpec("maml", directory, configuration, overrides))
    return directory


@pytest.fixture(scope="module")
def prototypical(tmp_path_factory) -> Path:
    return trained(tmp_path_factory.mktemp("runs") / "prototypical", "algorithm=prototypical")


@pytest.fixture(scope="module")
def maml(tmp_path_factory) -> Path:
    return trained(tmp_path_factory.mktemp("runs") / "maml")


def run_results(run: Path) -> dict:
    return json.loads((run / "results.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", ["maml", pytest.param("prototypical", marks=pytest.mark.slow)])
def test_without_options_it_is_the_test_of_the_run(request, name):
    run = request.getfixturevalue(name)
    found, expected = evaluate_run(run), run_results(run)
    for key in ("test_accuracy", "ci95", "test_loss", "protocol", "tested_iteration"):
        assert found[key] == expected[key], key
    assert found["trained_protocol"] == expected["protocol"]


def test_more_ways_and_both_protocols(prototypical, tmp_path, monkeypatch, capsys):
    output = tmp_path / "a" / "five.json"
    arguments = [str(prototypical), "task.ways=5", "task.shots=2", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["metadist evaluate", *arguments])
    assert exit_status(main) == 0
    printed = capsys.readouterr().out
    assert "ways differs: 3 (its run), 5 (here)" in printed
    assert "shots differs: 1 (its run), 2 (here)" in printed and str(output) in printed
    found = json.loads(output.read_text(encoding="utf-8"))
    assert (found["protocol"]["ways"], found["trained_protocol"]["ways"]) == (5, 3)
    assert found["overrides"] == ["task.ways=5", "task.shots=2"]
    assert found["test_accuracy"] != run_results(prototypical)["test_accuracy"]


@pytest.mark.parametrize("ways", [2, 5])
def test_outputs_that_are_classes_refuse_another_number_of_ways(maml, ways):
    expected = f"cannot be tested with {ways} outputs: MAML was trained with 3 .* task.ways=3"
    with pytest.raises(UserError, match=expected):
        evaluate_run(maml, f"task.ways={ways}")


def test_more_shots_and_inner_steps(maml):
    found = evaluate_run(maml, "task.shots=3", "algorithm.eval_inner_steps=5")
    assert found["protocol"]["shots"] == 3 and found["protocol"]["eval_inner_steps"] == 5


def write_class_folders(root: Path) -> Path:
    generator = np.random.default_rng(0)
    for index in range(10):
        folder = root / f"class{index}"
        folder.mkdir(parents=True)
        for number in range(4):
            pixels = generator.integers(256, size=(30, 40), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{number}.png")
    return root


def test_another_algorithm_adapts_its_own_parameters(prototypical):
    experiment = load_experiment(prototypical, "algorithm=maml")
    load_for_tasks(experiment, *saved_state.tested_checkpoint(prototypical))
    # Prototypical networks freeze the head, which MAML adapts.
    assert {"head.weight", "head.bias"} <= experiment.learner.eval().initial().keys()


def test_another_dataset_has_the_options_of_its_own_file(prototypical, tmp_path):
    root = write_class_folders(tmp_path / "images")
    of_folder = ("dataset.size=28", f"dataset.root={root}", "dataset=folder", "dataset.channels=1")
    fractions = ("dataset.validation_fraction=0.3", "dataset.test_fraction=0.3")
    found = evaluate_run(prototypical, *of_folder, *fractions)
    assert found["protocol"]["dataset"] == "folder"
    assert found["protocol"]["classes"] == {"train": 4, "validation": 3, "test": 3}
    assert found["trained_protocol"]["dataset"] == "glyphs"


@pytest.mark.parametrize("override", ["dataset=faces", "task.ways"])
def test_options_that_do_not_exist_are_refused(prototypical, override):
    with pytest.raises(UserError):
        evaluate_run(prototypical, override)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["callbacks=ema"], "callbacks=ema has no effect on the test of a trained run"),
        (["seed=3"], "seed=3 has no effect"),
        (["strategy=rpc"], "strategy=rpc has no effect"),
        (["trainer.evaltasks=3"], "trained run (did you mean eval_tasks?): replace options of"),
        (["trainer.iterations=3"], "replace options of task, dataset, model, algorithm, or"),
        (["trainer.test_checkpoint=best"], "has no effect on the test of a trained run, but --ch"),
        (["task.ways=2,3"], "task.ways=2,3 has several values: give one"),
        (["--checkpoint", "nothing.pt"], "give the path of a file, such as"),
        (["--checkpoint", "nothing.pt", "task.shots=2"], "nothing.pt"),
        (["dataset=omniglott"], "did you mean omniglot"),
        (["dataset.seed=${oc.env:NOPE}", "--trust-code"], "Environment variable 'NOPE' not found"),
    ],
)
def test_values_that_do_not_fit_are_one_sentence(maml, monkeypatch, capsys, arguments, expected):
    monkeypatch.delenv("NOPE", raising=False)
    monkeypatch.setattr(sys, "argv", ["metadist evaluate", str(maml), *arguments])
    assert exit_status(main) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and expected in error and error.count("\n") == 1, error


def test_another_model_is_one_sentence(maml):
    with pytest.raises(UserError, match="of another model or algorithm"):
        evaluate_run(maml, "model.filters=5")


def test_a_dataset_with_other_channels_is_refused(prototypical, tmp_path):
    for index, name in enumerate("abcdefghijklmnopqrst"):
        (tmp_path / name).mkdir()
        for number in range(4):
            pixels = Image.new("RGB", (28, 28), (10 * index, number, 0))
            pixels.save(tmp_path / name / f"{number}.png")
    options = ("dataset=folder", f"dataset.root={tmp_path}", "dataset.size=28")
    with pytest.raises(UserError, match=r"trained on images of shape \(1, 28, 28\), and the"):
        evaluate_run(prototypical, *options)
    assert evaluate_run(prototypical, *options, "dataset.channels=1")["test_tasks"] == 7


def test_several_checkpoints_are_an_ensemble(maml, monkeypatch, capsys):
    newest, older = (path for _, path in reversed(Checkpoints.of_run(maml).iterations()))
    alone = evaluate_run(maml, checkpoint=newest)
    twice = evaluate_run(maml, checkpoint=[newest, newest])
    assert twice["test_accuracy"] == alone["test_accuracy"]
    assert twice["test_loss"] == pytest.approx(alone["test_loss"], rel=1e-5)
    arguments = ["metadist evaluate", str(maml), "--checkpoint", str(newest)]
    monkeypatch.setattr(sys, "argv", [*arguments, "--checkpoint", str(older)])
    assert exit_status(main) == 0
    *_, file = capsys.readouterr().out.split()
    results = json.loads(Path(file).read_text())
    assert results["protocol"]["ensemble"] == 2
    assert results["protocol"]["checkpoint"] == "last, iteration 2"
    assert results["test_loss"] not in (alone["test_loss"], twice["test_loss"])
    iterations = results["tested_iteration"]
    assert iterations == results["iterations"] == [alone["tested_iteration"], 2]
    predictions = read_test_predictions(Path(file))
    accuracies = [record["accuracy"] for record in predictions]
    assert statistics.mean(accuracies) == pytest.approx(results["test_accuracy"])


def test_checkpoints_of_another_run_have_names_and_warnings_of_their_own(
    prototypical, tmp_path, monkeypatch, capsys
):
    other = trained(tmp_path / "other", "algorithm=prototypical", "++dataset.train_classes=24")
    file = Checkpoints.of_run(other).newest()
    arguments = ["metadist evaluate", str(prototypical), f"--checkpoint={file}"]
    monkeypatch.setattr(sys, "argv", arguments)
    assert exit_status(main) == 0
    output = capsys.readouterr().out
    assert "classes of this test may have been among those of training" in output
    written = Path(output.split()[-1])
    assert written.stem != file.stem
    assert json.loads(written.read_text())["trained_on_other_classes"] == [str(file)]


def test_a_checkpoint_that_does_not_exist_is_refused(maml):
    with pytest.raises(UserError, match=r"no checkpoint best: .* such as one of iteration-0000000"):
        evaluate_run(maml, checkpoint=Path("best"))


def test_pretrained_weights_are_no_run():
    with pytest.raises(UserError, match="metadist evaluate tests a run"):
        evaluate_run(Path("maml_omniglot_5w1s_cosine"))
    message = r"neither .* nor the name .* mean maml_omniglot_5w1s_cosine\?\).* --checkpoint NAME"
    with pytest.raises(UserError, match=message):
        evaluate_run(Path("maml_omniglot_5w1s"))


def test_a_checkpoint_in_place_of_the_run_is_refused(maml):
    with pytest.raises(UserError, match=r"is a file, not a run directory: .* --checkpoint FILE"):
        evaluate_run(maml / "checkpoints" / "iteration-00000002.pt")


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(UserError, match="is not a run directory"):
        evaluate_run(tmp_path)


def test_another_checkpoint_and_the_default_file(maml, monkeypatch, capsys):
    checkpoint = maml / "checkpoints" / "iteration-00000002.pt"
    arguments = [str(maml), "task.shots=2", "--checkpoint", str(checkpoint)]
    monkeypatch.setattr(sys, "argv", ["metadist evaluate", *arguments])
    assert exit_status(main) == 0
    output = maml / "evaluations" / "iteration-00000002,task.shots=2.json"
    found = json.loads(output.read_text(encoding="utf-8"))
    assert (found["tested_iteration"], found["checkpoint"]) == (2, str(checkpoint))
    assert found["protocol"]["checkpoint"] == "iteration 2"
    assert f"{checkpoint}, iteration 2" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["metadist evaluate", str(maml)])
    assert exit_status(main) == 0 and "the protocol is that of its run" in capsys.readouterr().out
    assert (maml / "evaluations" / "own_protocol.json").exists()


def test_exported_weights_have_the_result_of_their_run(maml, tmp_path):
    weights = export_weights(maml, tmp_path / "weights.safetensors")
    found, expected = evaluate_run(maml, checkpoint=weights), run_results(maml)
    for key in ("test_accuracy", "protocol", "tested_iteration"):
        assert found[key] == expected[key], key


@pytest.mark.parametrize(
    "overrides",
    [
        [[*["trainer.eval_tasks=4"] * 13, f"task.shots={shots}"] for shots in (1, 2)],
        [["trainer.eval_tasks='4'"], ['trainer.eval_tasks="4"']],
    ],
)
def test_different_overrides_have_files_of_their_own(maml, monkeypatch, capsys, overrides):
    before = {*(maml / "evaluations").glob("*.json")}
    for each in overrides:
        arguments = [str(maml), *each]
        monkeypatch.setattr(sys, "argv", ["metadist evaluate", *arguments])
        assert exit_status(main) == 0
    assert len({*(maml / "evaluations").glob("*.json")} - before) == 2


@pytest.mark.parametrize(("given", "trusted"), [([], False), (["--trust-code"], True)])
def test_code_is_trusted_if_the_command_line_says_so(tmp_path, monkeypatch, given, trusted):
    seen = []
    monkeypatch.setattr(evaluate, "evaluate_run", lambda *_, **options: seen.append(options) or {})
    monkeypatch.setattr(evaluate, "summary", lambda results: [])
    arguments = [str(tmp_path), f"--output={tmp_path / 'a.json'}", *given]
    monkeypatch.setattr(sys, "argv", ["metadist evaluate", *arguments])
    assert exit_status(main) == 0 and len(seen) == 1
    assert seen[0]["checkpoint"] is None and seen[0]["trust_code"] == trusted


def test_a_file_that_cannot_be_written_names_the_option(maml, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    arguments = [str(maml), "--output", str(tmp_path / "file" / "a.json")]
    monkeypatch.setattr(sys, "argv", ["metadist evaluate", *arguments])
    assert exit_status(main) == 2
    error = capsys.readouterr().err
    assert "choose another file with --output" in error and "hydra.run.dir" not in error


def test_the_summary_of_a_regression_and_of_a_run_without_results():
    results = {"test_mse": 0.25, "ci95": 0.125, "test_tasks": 600, "checkpoint": "a.pt"}
    lines = summary({**results, "tested_iteration": 7, "protocol": {}, "trained_protocol": None})
    assert lines[0] == "test MSE 0.25 ± 0.125 over 600 tasks (95% interval over tasks)"
    assert lines[1:] == ["  a.pt, iteration 7", "  the run itself has not been tested"]


@pytest.mark.parametrize(("key", "warned"), [("split_seed", True), ("shots", False)])
def test_the_summary_warns_if_the_classes_are_divided_otherwise(key, warned):
    results = {"test_accuracy": 0.5, "ci95": 0.1, "test_tasks": 2, "checkpoint": "a.pt"}
    protocols = {
        "protocol": {"dataset": "omniglot", key: 1},
        "trained_protocol": {"dataset": "omniglot", key: 0},
        "method": {"options": {"inner_lr": 0.5}},
        "trained_method": {"options": {"inner_lr": 0.4}},
    }
    lines = summary({**results, "tested_iteration": 7, **protocols})
    assert f"  {key} differs: 0 (its run), 1 (here)" in lines
    assert "  options.inner_lr differs: 0.4 (its run), 0.5 (here)" in lines
    assert ("may have been among those of training" in lines[-1]) == warned


@pytest.mark.parametrize(("metric", "value"), [("accuracy", "25.00%"), ("mse", "0.25")])
def test_the_summary_of_a_single_task_has_no_interval(metric, value):
    results = {f"test_{metric}": 0.25, "ci95": float("nan"), "test_tasks": 1, "checkpoint": "a.pt"}
    lines = summary({**results, "tested_iteration": 7, "protocol": {}, "trained_protocol": None})
    assert lines[0].endswith(f" {value} over 1 tasks")


def test_the_named_checkpoint_of_a_run_that_tests_its_best(tmp_path):
    run = trained(tmp_path / "best", "trainer.test_checkpoint=best", "algorithm=prototypical")
    own = evaluate_run(run)
    assert own["protocol"] == own["trained_protocol"] == run_results(run)["protocol"]
    assert "the protocol is that of its run" in summary(own)[-1]
    other = 2 if run_results(run)["tested_iteration"] == 4 else 4
    checkpoint = run / "checkpoints" / f"iteration-{other:08}.pt"
    assert evaluate_run(run, checkpoint=checkpoint)["tested_iteration"] == other
