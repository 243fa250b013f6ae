"""`metadist evaluate`: the command, its file and its summary."""

import json
import shutil
import statistics
import sys
from pathlib import Path

import pytest
from tiny import finished_run, run_results

from metadist.cli import evaluate
from metadist.cli.command import exit_status
from metadist.cli.evaluate import main, summary
from metadist.inference import evaluate_run
from metadist.reports import read_test_predictions
from metadist.training import export_weights
from metadist.training.checkpoints import Checkpoints


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


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["callbacks=ema"], "callbacks=ema has no effect on the test of a trained run"),
        (["seed=3"], "seed=3 has no effect"),
        (["strategy=rpc"], "strategy=rpc has no effect"),
        (["partition=dim0"], "partition=dim0 has no effect"),
        (["timeout_seconds=5"], "timeout_seconds=5 has no effect"),
        (["task.held_out=2"], "task.held_out=2 has no effect"),
        (["++algorithm.first_order=true"], "is an option of the training of MAML, which is over"),
        (["algorithm.inner_steps=5"], "leave it out, or give algorithm.eval_inner_steps."),
        (["algorithm.inner_step=5"], "did you mean inner_steps?"),
        (["trainer.evaltasks=3"], "trained run (did you mean eval_tasks?): replace options of"),
        (["trainer.iterations=3"], "replace options of task, dataset, model, algorithm, or"),
        (["trainer.test_checkpoint=best"], "has no effect on the test of a trained run, but --ch"),
        (["task.ways=2,3"], "task.ways=2,3 has several values: give one"),
        (["--checkpoint", "nothing.pt"], "give the path of a file, such as"),
        (["--checkpoint", "nothing.pt", "task.shots=2"], "nothing.pt"),
        (["shots=2"], "did you mean task.shots=…?"),
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


def test_several_checkpoints_are_an_ensemble(maml, monkeypatch, capsys):
    newest, older = (path for _, path in reversed(Checkpoints(maml).iterations()))
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
    other = finished_run(tmp_path / "other", "algorithm=prototypical", "++dataset.train_classes=24")
    file = Checkpoints(other).newest()
    arguments = ["metadist evaluate", str(prototypical), f"--checkpoint={file}"]
    monkeypatch.setattr(sys, "argv", arguments)
    assert exit_status(main) == 0
    output = capsys.readouterr().out
    assert "classes of this test may have been among those of training" in output
    written = Path(output.split()[-1])
    assert written.stem != file.stem
    assert json.loads(written.read_text())["trained_on_other_classes"] == [str(file)]


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


def test_the_file_of_a_test_of_pretrained_weights_has_their_name(maml, tmp_path, monkeypatch):
    export_weights(maml, tmp_path / "mine.safetensors")
    monkeypatch.setenv("METADIST_PRETRAINED", str(tmp_path))
    arguments = [str(maml), "trainer.eval_tasks=2", "--checkpoint", "mine"]
    monkeypatch.setattr(sys, "argv", ["metadist evaluate", *arguments])
    assert exit_status(main) == 0
    assert (maml / "evaluations" / "mine,trainer.eval_tasks=2.json").exists()


@pytest.mark.parametrize(
    "overrides",
    [
        [[*["trainer.eval_tasks=4"] * 13, f"task.shots={shots}"] for shots in (1, 2)],
        [["trainer.eval_tasks='4'"], ['trainer.eval_tasks="4"']],
        ["--checkpoint={}/iteration-00000002.pt", "--checkpoint={}/kept/iteration-00000002.pt"],
    ],
)
def test_different_tests_have_files_of_their_own(maml, monkeypatch, capsys, overrides):
    saved = maml / "checkpoints"
    if isinstance(overrides[0], str):
        (saved / "kept").mkdir()
        shutil.copy(saved / "iteration-00000002.pt", saved / "kept")
        overrides = [[each.format(saved), "trainer.eval_tasks=5"] for each in overrides]
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
    assert lines[0].endswith(f" {value} over 1 task")
