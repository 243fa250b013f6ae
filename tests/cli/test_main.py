"""The commands' main functions: whose process they end, and with which exit status."""

import sys
from types import SimpleNamespace

import pytest

from metadist.cli import exit_status
from metadist.cli.main import is_main_program
from metadist.errors import UserError


@pytest.mark.parametrize(
    ("started", "program"), [("a/maml.py", True), ("a/b/../maml.py", True), ("wrapper.py", False)]
)
def test_a_script_is_the_main_program_or_is_called_by_one(tmp_path, monkeypatch, started, program):
    (tmp_path / "a" / "b").mkdir(parents=True)
    script = (tmp_path / "a" / "maml.py").resolve()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__file__=started))
    assert is_main_program(script) is program
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace())  # python -c, or interactive
    assert not is_main_program(script)


def test_a_user_error_is_one_sentence(capsys):
    def work() -> None:
        raise UserError("the folder is empty: give another one.")

    assert exit_status(work) == 2
    printed = capsys.readouterr()
    assert printed.err == "error: the folder is empty: give another one.\n"
    assert printed.out == ""


@pytest.mark.parametrize(("returned", "status"), [(None, 0), (0, 0), (130, 130)])
def test_the_status_is_what_the_work_returns(returned, status):
    assert exit_status(lambda: returned) == status


def test_any_other_error_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        exit_status(lambda: 1 // 0)
