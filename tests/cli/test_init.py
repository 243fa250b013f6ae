"""`metadist init`: what it writes, and where it refuses to."""

import sys

import pytest

from metadist.cli.command import exit_status
from metadist.cli.init import main


def init(monkeypatch, directory) -> int:
    monkeypatch.setattr(sys, "argv", ["metadist init", str(directory)])
    return exit_status(main)


def test_it_writes_the_files_of_the_readme(monkeypatch, tmp_path):
    project = tmp_path / "a" / "demo"
    assert init(monkeypatch, project) == 0
    rows = [line for line in (project / "README.md").read_text().splitlines() if "| `" in line]
    named = [name for line in rows for name in line.split("`")[1::2] if "/" in name]
    assert len(named) >= 7
    assert all((project / name).exists() for name in named)
    assert not list(project.rglob("__pycache__"))


def test_an_empty_directory_is_used(monkeypatch, tmp_path):
    assert init(monkeypatch, tmp_path) == 0
    assert (tmp_path / "README.md").exists()


@pytest.mark.parametrize("kind", ["directory", "file"])
def test_nothing_is_overwritten(monkeypatch, capsys, tmp_path, kind):
    file = tmp_path / "README.md"
    file.write_text("mine")
    assert init(monkeypatch, tmp_path if kind == "directory" else file) == 2
    assert "is not an empty directory: give another one" in capsys.readouterr().err
    assert file.read_text() == "mine" and list(tmp_path.iterdir()) == [file]


def test_a_directory_that_cannot_be_written_is_one_sentence(monkeypatch, capsys, tmp_path):
    (tmp_path / "file").touch()
    assert init(monkeypatch, tmp_path / "file" / "demo") == 2
    assert "demo cannot be written (Not a directory): give another" in capsys.readouterr().err
