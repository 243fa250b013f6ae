"""metadist compare: two runs as a user would compare them."""

import sys
from pathlib import Path

import pytest
from tiny import train

from metadist.cli import compare
from metadist.cli.command import exit_status
from metadist.reports import read_results, write_json, write_test_predictions
from metadist.reports.paired_comparison import PairedDifference


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs")
    train(str(directory / "a"), "strategy=local")
    train(str(directory / "b"), "strategy=local", "seed=1", "trainer.iterations=2")
    train(str(directory / "c"), "strategy=local", "algorithm=prototypical")
    return directory


def run_command(monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["metadist compare", *arguments])
    return exit_status(compare.main)


def test_the_difference_is_printed(runs, monkeypatch, capsys):
    monkeypatch.chdir(runs)
    assert run_command(monkeypatch, "a", "b") == 0
    first, *means, last = capsys.readouterr().out.splitlines()
    assert first == "test accuracy over the same 7 tasks"
    accuracies = [read_results(runs / name)["test_accuracy"] for name in "ab"]
    assert [line.split() for line in means] == [
        [name, f"{value:.2%}"] for name, value in zip("ab", accuracies, strict=True)
    ]
    assert accuracies[0] != accuracies[1] and f"{accuracies[1] - accuracies[0]:+.2%}" in last
    assert last.startswith("difference ") and "95% interval" in last


def test_the_options_that_differ_are_printed(runs, monkeypatch, capsys):
    monkeypatch.chdir(runs)
    for name, iterations in (("a", 5), ("b", 2)):
        Path(name, ".hydra").mkdir()
        config = f"trainer: {{iterations: {iterations}, eval_every: 1}}\nlogger: {name}\n"
        Path(name, ".hydra", "config.yaml").write_text(config)
    assert run_command(monkeypatch, "a", "b") == 0
    *_, difference, options = capsys.readouterr().out.splitlines()
    assert difference.startswith("difference ")
    assert options == "trainer.iterations differs: 5 (first), 2 (second)"


def test_evaluations_are_compared(tmp_path, monkeypatch, capsys):
    results = {"test_accuracy": 0.5, "protocol": {"shots": 1}}
    for name, values in (("a", (0.25, 0.75)), ("b", (0.5, 1.0))):
        write_json(tmp_path / f"{name}.json", results)
        records = [{"task": task, "accuracy": value} for task, value in enumerate(values)]
        write_test_predictions(tmp_path / f"{name}.predictions.jsonl", records)
    monkeypatch.chdir(tmp_path)
    assert run_command(monkeypatch, "a.json", "b.json") == 0
    assert "difference +25.00% ± 0.00% (second" in capsys.readouterr().out
    assert run_command(monkeypatch, "a.json", "b.predictions.jsonl") == 2
    assert "b.predictions.jsonl is not a file that this version" in capsys.readouterr().err


def test_other_protocols_are_refused_unless_ignored(runs, monkeypatch, capsys):
    monkeypatch.chdir(runs)
    assert run_command(monkeypatch, "a", "c") == 2
    error = capsys.readouterr().err
    assert "inner_steps differs: 1 (first), 0 (second)" in error and error.count("\n") == 1
    keys = [word for word in error.rstrip(".\n").split() if word.endswith("_steps")][-2:]
    ignored = [part for key in keys for part in ("--ignore", key)]
    assert run_command(monkeypatch, "a", "c", *ignored) == 0
    assert run_command(monkeypatch, "a", "b", "--ignore", "backbon") == 2
    assert "--ignore backbon is no key of the protocol (did you" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("found", "lines"),
    [
        (
            PairedDifference("accuracy", (0.5, 0.75), 0.25, 0.125, 600),
            ["accuracy", "50.00%", "75.00%", "+25.00% ± 12.50% (second minus first", "does not"],
        ),
        (
            PairedDifference("accuracy", (0.5, 0.375), -0.125, 0.125, 600),
            ["accuracy", "50.00%", "37.50%", "-12.50% ± 12.50% (second", "interval, contains 0)"],
        ),
        (
            PairedDifference("mse", (2.0, 0.5), -1.5, 1.25, 600),
            ["MSE", "2", "0.5", "-1.5 ± 1.25 (second minus first, 95% interval, does not contain"],
        ),
        (
            PairedDifference("mse", (2.0, 0.5), -1.5, None, 1),
            ["MSE", "2", "0.5", "difference -1.5 (no interval: the values are not finite, or of"],
        ),
    ],
)
def test_means_and_difference_with_their_units(found, lines):
    printed = compare.summary(found, Path("a/first"), Path("second"))
    assert printed[0] == f"test {lines[0]} over the same {found.tasks} tasks"
    assert printed[1:3] == [f"  a/first  {lines[1]}", f"  second   {lines[2]}"]
    assert all(part in printed[3] for part in lines[3:]) and len(printed) == 4
