"""The `metadist` command: its table of subcommands."""

import importlib
import subprocess
import sys

import pytest

from metadist import __version__
from metadist.cli.command import COMMANDS, exit_status, main
from metadist.errors import FULL_TRACEBACKS


def run(monkeypatch, *arguments: str) -> int | None:
    monkeypatch.setattr(sys, "argv", ["metadist", *arguments])
    return main()


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_a_function(name):
    module, _, function = COMMANDS[name].target.partition(":")
    assert callable(getattr(importlib.import_module(module), function))


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - {"maml", "ddp"}))
def test_every_command_describes_itself(monkeypatch, capsys, name):
    with pytest.raises(SystemExit) as leaving:
        run(monkeypatch, name, "--help")
    assert leaving.value.code == 0
    printed = capsys.readouterr().out
    assert f"usage: metadist {name} " in printed
    module = importlib.import_module(COMMANDS[name].target.partition(":")[0])
    description = module.__doc__.split("\n\n", 1)[1]
    assert " ".join(description.split()[:12]) in " ".join(printed.split())


def test_a_keyboard_interrupt_during_the_imports_is_a_status(monkeypatch, capsys):
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib, "import_module", interrupted)
    assert run(monkeypatch, "maml", "seed=1") == 130
    assert capsys.readouterr() == ("", "")


def test_the_version(monkeypatch, capsys):
    assert not run(monkeypatch, "--version")
    assert capsys.readouterr().out == f"metadist {__version__}\n"


def test_the_help_lists_the_commands(monkeypatch, capsys):
    assert not run(monkeypatch, "help")
    rows = [line.split()[:1] for line in capsys.readouterr().out.splitlines()]
    assert all([name] in rows for name in COMMANDS)


@pytest.mark.parametrize(("rank", "lines"), [("0", 1), ("1", 0)])
def test_an_unknown_command_is_one_sentence_on_rank_zero(monkeypatch, capsys, rank, lines):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run(monkeypatch, "mamll") == 2
    printed = capsys.readouterr().err.splitlines()
    assert len(printed) == lines
    assert all("no command 'mamll' (did you mean maml?): " in line for line in printed)


def test_other_commands_are_not_imported():
    program = (
        "import sys; sys.argv = ['metadist', '--help']\n"
        "from metadist.cli.command import main; main()\n"
        "assert 'hydra' not in sys.modules, 'hydra was imported'"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, timeout=300)


def test_an_error_of_other_code_has_a_traceback_that_starts_there(capsys, monkeypatch):
    def work():
        raise LookupError("no such thing")

    for full in ("0", "1"):
        monkeypatch.setenv("HYDRA_FULL_ERROR", full)
        monkeypatch.delenv(FULL_TRACEBACKS, raising=False)
        assert exit_status(work) == 1
        printed = capsys.readouterr().err
        assert "in work" in printed and printed.endswith("LookupError: no such thing\n")
        assert ("in exit_status" in printed) is (full == "1")
