"""metadist compare: two runs as a user would compare them."""

import sys

import pytest
from tiny import train

from metadist.cli import compare


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs")
    train(str(directory / "a"), "strategy=local")
    train(str(directory / "b"), "strategy=local", "seed=1", "trainer.iterations=2")
    train(str(directory / "c"), "strategy=local", "algorithm=prototypical")
    return directory


def run_command(monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["metadist compare", *arguments])
    return compare.main()


def test_the_difference_is_printed(runs, monkeypatch, capsys):
    monkeypatch.chdir(runs)
    assert run_command(monkeypatch, "a", "b") == 0
    first, *means, last = capsys.readouterr().out.splitlines()
    assert first == "test accuracy over the same 7 tasks"
    assert [line.split()[0] for line in means] == ["a", "b"]
    assert last.startswith("difference ") and "95% interval" in last


def test_other_protocols_are_refused_unless_ignored(runs, monkeypatch, capsys):
    monkeypatch.chdir(runs)
    assert run_command(monkeypatch, "a", "c") == 2
    error = capsys.readouterr().err
    assert "inner_steps differs: 1 (first), 0 (second)" in error and error.count("\n") == 1
    keys = [word for word in error.rstrip(".\n").split() if word.endswith("_steps")][-2:]
    ignored = [part for key in keys for part in ("--ignore", key)]
    assert run_command(monkeypatch, "a", "c", *ignored) == 0
