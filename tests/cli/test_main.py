"""The commands' main functions: whose process they end, and with which exit status."""

import contextlib
import io
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import CommandResult, command, run_command
from tiny import SMALL
from worlds import run_world

import metadist.cli.main
from metadist.cli import exit_status
from metadist.cli.main import is_main_program, maml
from metadist.config.resolvers import run_stamp
from metadist.errors import UserError
from metadist.loggers.console import print_plain


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


def test_another_working_directory_is_refused():
    (shown,) = run_command("metadist", "maml", "strategy=local", "hydra.job.chdir=true")
    assert shown.status == 2
    assert shown.err.startswith("error: hydra.job.chdir=true does not apply: paths and modules")


def command_with_wrong_options(*overrides: str) -> CommandResult:
    def refuse(*_: object) -> None:
        raise UserError("the options do not fit: choose others.")

    metadist.cli.main.replace_options = refuse
    return command("maml.py", ("strategy=allreduce", *overrides))


def test_options_that_do_not_fit_are_one_sentence_and_leave_no_directory(tmp_path):
    run = tmp_path / "run"
    zero, one = run_world(command_with_wrong_options, 2, f"hydra.run.dir={run}")
    assert (zero.status, one.status) == (2, 2)
    assert zero.err == "error: the options do not fit: choose others.\n" and one.err == ""
    assert not run.exists()


def test_a_sweep_goes_on_after_options_that_do_not_fit(tmp_path):
    sweep = ("seed=0,1", "sweep.on_failure=continue", f"hydra.sweep.dir={tmp_path}", "-m")
    (shown,) = run_world(command_with_wrong_options, 1, *sweep)
    assert shown.err.count("error: the options do not fit") == 2
    assert all((tmp_path / job / "failure.json").exists() for job in "01")


def twice(*overrides: str) -> tuple[str, str]:
    """The directories of two runs in one process."""
    sys.argv = ["maml.py", *SMALL, "trainer.eval_every=0", "trainer.eval_tasks=2", *overrides]
    stamps = []
    metadist.cli.main.exit_process = lambda status, is_program: stamps.append(run_stamp())
    for _ in range(2):
        maml()
    return stamps[0], stamps[1]


def test_two_runs_in_one_process_have_two_directories(tmp_path):
    found = run_world(twice, 2, f"hydra.run.dir={tmp_path}/${{run_stamp:}}", "trainer.iterations=1")
    assert found[0] == found[1] and found[0][0] != found[0][1]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(found[0])


def test_a_user_error_is_one_sentence(capsys):
    def work() -> None:
        raise UserError("the folder is empty: give another one.")

    assert exit_status(work) == 2
    printed = capsys.readouterr()
    assert printed.err == "error: the folder is empty: give another one.\n"
    assert printed.out == ""


def test_the_status_of_a_command_that_returns_or_exits():
    assert exit_status(lambda: None) == 0
    assert exit_status(lambda: 130) == 130
    with pytest.raises(SystemExit) as exited:
        exit_status(lambda: sys.exit(130))
    assert exited.value.code == 130


def test_a_keyboard_interrupt_is_a_status_without_a_message(capsys):
    def work() -> None:
        raise KeyboardInterrupt

    assert exit_status(work) == 130 and capsys.readouterr().err == ""


def print_result(path: str) -> tuple[int, str]:
    """Exit status and errors of printing a result to a file that has Latin letters alone."""
    if path:
        output = os.open(path, os.O_WRONLY | os.O_CREAT)
    else:  # a pipe whose reader has ended
        reader, output = os.pipe()
        os.close(reader)
    os.dup2(output, 1)
    sys.stdout = os.fdopen(1, "w", encoding="ascii")
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        status = exit_status(lambda: print_plain("90% ± 1% \u2713"))
        sys.stdout.flush()  # as Python does at its end
    return status, printed.getvalue()


def test_a_result_is_printed_in_any_encoding(tmp_path):
    assert run_world(print_result, 1, str(tmp_path / "out")) == [(0, "")]
    assert (tmp_path / "out").read_text() == "90% +/- 1% ?\n"


def test_a_reader_that_has_ended_is_a_status_without_a_message():
    assert run_world(print_result, 1, "") == [(141, "")]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_output_is_one_sentence():
    ((status, error),) = run_world(print_result, 1, "/dev/full")
    assert status == 2 and error.startswith("error: cannot write to the standard output (")
    assert error.count("\n") == 1
