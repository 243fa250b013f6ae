"""The console logger on a terminal and elsewhere."""

import errno
import io
import os
import re
import sys
from pathlib import Path

import pytest
from rich import get_console
from worlds import run_world

from metadist.errors import UserError
from metadist.loggers import ConsoleLogger, Run
from metadist.loggers.console import print_plain
from metadist.loggers.formatting import summarize_results

CONTENTS = {
    "results.json": "the results",
    "metrics.jsonl": "a line for each iteration",
    "checkpoints": "to resume from",
    "wandb": "wandb sync",
}
RESULTS = {
    "test_accuracy": 0.9731,
    "ci95": 0.0042,
    "test_tasks": 600,
    "test_accuracy_before": 0.2014,
    "train_loss": 0.0812,
    "iterations": 100,
    "tasks_per_second": 123.4,
    "wall_seconds": 754.2,
    "world_size": 2,
    "strategy": "rpc",
}


class FakeTerminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


def log_run(directory, start=0, iterations=100, finish=True, title="MAML on [glyphs]"):
    logger = ConsoleLogger(refresh_seconds=0.0)
    logger.start(Run(directory, "maml", {}, iterations, start, title, CONTENTS))
    for iteration in range(start + 1, iterations + 1):
        logger.log_metrics(
            {
                "iteration": iteration,
                "train_loss": 1.0 / iteration,
                "train_accuracy": 0.5,
                "tasks_per_second": 123.4,
                "seconds": 0.1,
            }
        )
        if iteration % 50 == 0:
            logger.log_metrics(
                {
                    "iteration": iteration,
                    "validation_loss": 0.25,
                    "validation_accuracy": 0.875,
                    "validation_ci95": 0.01,
                }
            )
    if finish:
        plot = directory / "learning_curves.png"
        for name in ("metrics.jsonl", "results.json"):
            (directory / name).touch()
        (directory / "checkpoints").mkdir(exist_ok=True)
        logger.finish(RESULTS, [plot])
    logger.close()
    logger.close()


def terminal(monkeypatch, columns):
    stream = FakeTerminal()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm-256color")
    return stream


def without_escapes(text):
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


def test_lines_are_plain_without_a_terminal(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # set by CI systems
    log_run(tmp_path)
    text = capsys.readouterr().out
    assert all(letter.isprintable() or letter == "\n" for letter in text)
    lines = text.splitlines()
    assert lines[0] == "MAML on [glyphs]"
    progress = [line for line in lines if re.match(r"iteration \d+ of 100 ", line)]
    assert 20 <= len(progress) <= 22
    assert progress[0].startswith(
        "iteration 1 of 100 (1%): loss 1.0000, accuracy 50.0%, 123 tasks/s"
    )
    assert progress[-1].startswith("iteration 100 of 100 (100%): loss 0.0100")
    assert "iteration 50: validation accuracy 87.50% ± 1.00%, loss 0.2500" in lines


def test_the_end_shows_results_and_contents_of_the_directory(tmp_path, capsys):
    log_run(tmp_path)
    text = capsys.readouterr().out
    for expected in (
        "test accuracy      97.31% ± 0.42% over 600 tasks",
        "before adaptation  20.14%",
        "training loss      0.0812 after 100 iterations",
        "time               0:12:34",
        "speed              123 tasks/s, rpc on 2 workers",
        f"\n{tmp_path}\n",
        "results.json",
        "metrics.jsonl",
        "checkpoints/",
        "learning_curves.png",
    ):
        assert expected in text
    assert "wandb" not in text  # not in the directory
    assert "results.json/" not in text


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (2, "0.50, 0.33"),
        (10, "0.50, 0.33, 0.25, 0.20, 0.16, 0.14, 0.12, 0.11, 0.10, 0.09"),
        (12, "0.50, 0.33, 0.25, 0.20, 0.16, 0.14, 0.12, 0.11, 0.10, …, 0.07"),
    ],
)
def test_the_end_shows_the_metric_after_each_step(steps, expected):
    rows = [{"steps": k, "mean": 1 / (1 + k), "ci95": 0.1} for k in range(steps + 1)]
    results = {"test_mse": rows[-1]["mean"], "test_mse_before": 1.0, "test_mse_by_steps": rows}
    found = dict(summarize_results(results))["after each step"]
    assert [each[:4] for each in found.split(", ")] == expected.split(", ")


def test_regression_shows_mse(tmp_path, capsys):
    logger = ConsoleLogger()
    logger.start(Run(tmp_path, "maml", {}, 1, 0, "MAML on sinusoid"))
    logger.log_metrics({"iteration": 1, "train_loss": 3.5})
    logger.log_metrics({"iteration": 1, "validation_loss": 0.5, "validation_mse": 0.5})
    logger.finish({"test_mse": 0.0432, "ci95": 0.0021, "test_tasks": 100}, [])
    logger.close()
    text = capsys.readouterr().out
    assert "validation MSE 0.5000, loss 0.5000" in text
    assert "test MSE  0.0432 ± 0.0021 over 100 tasks" in text
    assert "accuracy" not in text


def test_resumed_run_is_announced(tmp_path, capsys):
    log_run(tmp_path, start=60, finish=False)
    text = capsys.readouterr().out
    assert "resumed at iteration 60" in text
    lines = [line for line in text.splitlines() if re.match(r"iteration \d+ of 100 ", line)]
    assert [int(line.split()[1]) for line in lines] == list(range(65, 101, 5))


def test_run_of_one_iteration_has_one_line(tmp_path, capsys):
    log_run(tmp_path, iterations=1, finish=False)
    assert capsys.readouterr().out.count("iteration 1 of 1 (100%)") == 1


def test_control_characters_are_not_printed(tmp_path, capsys):
    log_run(tmp_path, iterations=1, finish=False, title="bad \x1b[31m name")
    assert "\x1b" not in capsys.readouterr().out


def test_output_with_ascii_encoding(tmp_path, monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    log_run(tmp_path)
    assert b"97.31% +/- 0.42%" in stream.buffer.getvalue()


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_progress_bar_fits_the_terminal(tmp_path, monkeypatch, columns):
    stream = terminal(monkeypatch, columns)
    log_run(tmp_path)
    written = stream.getvalue()
    bars = [part for part in re.split(r"[\r\n]", without_escapes(written)) if "/100 " in part]
    assert bars
    assert max(len(bar) for bar in bars) <= columns
    if columns >= 80:
        assert "loss 0.0100  accuracy  50.0%  123 tasks/s 0:00:" in bars[-1]
    else:
        assert "━━━ 100/100 loss 0.0100 0:00:" in bars[-1]
    text = without_escapes(written)
    assert "MAML on [glyphs]" in text  # not interpreted as markup
    assert "iteration 50: validation accuracy 87.50% ± 1.00%" in text
    assert "97.31% ± 0.42% over 600 tasks" in text
    assert written.count("\x1b[1;32m") == 1  # the result stands out
    assert written.count("\x1b[?25h") == written.count("\x1b[?25l") == 1  # cursor restored


def test_the_bar_has_a_callbacks_metrics_after_those_of_training(tmp_path, monkeypatch):
    stream = terminal(monkeypatch, 120)
    logger = ConsoleLogger(refresh_seconds=0.0)
    logger.start(Run(tmp_path, "maml", {}, 2, 0, "title"))
    for iteration in (1, 2):
        logger.log_metrics({"iteration": iteration, "train_loss": 1.0, "train_accuracy": 0.5})
        logger.log_metrics({"iteration": iteration, "train_change": 0.25})
    logger.close()
    last = without_escapes(stream.getvalue()).split("\r")[-1]
    assert "2/2 loss 1.0000  accuracy  50.0%  change 0.2500 0:00:" in last


def test_the_bar_is_refreshed_no_more_often_than_asked_for(tmp_path, monkeypatch):
    written = {}
    for seconds in (0.0, 1e12):
        stream = terminal(monkeypatch, 80)
        logger = ConsoleLogger(refresh_seconds=seconds)
        logger.start(Run(tmp_path, "maml", {}, 50, 0, "title"))
        for iteration in range(1, 51):
            logger.log_metrics({"iteration": iteration, "train_loss": 1.0})
        logger.close()
        written[seconds] = without_escapes(stream.getvalue()).count("/50 ")
    assert written[0.0] >= 50 and written[1e12] <= 3


@pytest.mark.parametrize(("term", "encoding"), [("dumb", "utf-8"), ("xterm", "latin-1")])
def test_dumb_terminal_gets_plain_lines(tmp_path, monkeypatch, term, encoding):
    stream = terminal(monkeypatch, 80)
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(stream, "encoding", encoding, raising=False)
    log_run(tmp_path)
    assert "\x1b" not in stream.getvalue()
    assert "iteration 5 of 100 (5%)" in stream.getvalue()


def test_lines_have_the_time_that_is_left_and_in_the_end_the_time_it_took(
    tmp_path, capsys, monkeypatch
):
    now = 0.0
    monkeypatch.setattr(get_console(), "get_time", lambda: now)
    logger = ConsoleLogger()
    logger.start(Run(tmp_path, "maml", {}, 100, 0, "title"))
    for iteration in range(1, 101):
        now += 2.0
        logger.log_metrics({"iteration": iteration, "train_loss": 1.0})
    logger.close()
    lines = capsys.readouterr().out.splitlines()
    assert "iteration 25 of 100 (25%): loss 1.0000, 0:02:30 left" in lines
    assert lines[-1] == "iteration 100 of 100 (100%): loss 1.0000, in 0:03:20"


def test_close_after_an_error_restores_the_terminal(tmp_path, monkeypatch):
    stream = terminal(monkeypatch, 80)
    logger = ConsoleLogger()
    logger.start(Run(tmp_path, "maml", {}, 10, 0, "title"))
    assert sys.stdout is not stream  # rich redirects prints while the bar is live
    logger.close()
    logger.close()
    assert sys.stdout is stream
    assert stream.getvalue().count("\x1b[?25h") == 1


def test_unwritable_output_is_a_user_error(tmp_path, monkeypatch):
    class Full(io.StringIO):
        def write(self, text):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(sys, "stdout", Full())
    logger = ConsoleLogger()
    expected = r"cannot write to the standard output \(No space.*, or redirect it elsewhere\.$"
    with pytest.raises(UserError, match=expected):
        logger.start(Run(tmp_path, "maml", {}, 10, 0, "title"))
    logger.close()


def finish_without_reader(directory: Path) -> str:
    """Finish a run whose reader has ended, warn, and flush as Python does at its end."""
    reader, output = os.pipe()
    os.dup2(output, 1)
    os.close(output)
    sys.stdout = os.fdopen(1, "w")
    logger = ConsoleLogger()
    logger.start(Run(directory, "maml", {}, 10, 0, "title"))
    os.close(reader)
    logger.finish(RESULTS, [])
    logger.log_message("few tasks")
    logger.close()
    sys.stdout.flush()
    return "finished"


def test_a_reader_that_ends_after_the_test_is_no_failure(tmp_path):
    assert run_world(finish_without_reader, 1, tmp_path) == ["finished"]


def test_own_metrics_and_samples_per_second_are_shown(tmp_path, capsys):
    descriptions = {"validation": "held-out examples", "test": "few-shot tasks"}
    logger = ConsoleLogger()
    run = Run(tmp_path, "ddp", {}, 1, 0, "t", {}, descriptions)
    logger.start(run)
    speeds = {"tasks_per_second": 10.0, "samples_per_second": 160.0}
    logger.log_metrics({"iteration": 1, "train_loss": 1.5, "train_entropy": 0.75, **speeds})
    validation = {"validation_accuracy": 0.01, "validation_ci95": 0.001, "validation_entropy": 0.5}
    logger.log_metrics({"iteration": 1, **validation})
    test = {
        "test_accuracy": 0.6,
        "test_accuracy_before": 0.2,
        "test_entropy_before": 0.75,
        "test_loss": 1.0,
        "test_tasks": 9,
    }
    logger.finish({**test, "test_entropy": 0.25, **speeds}, [])
    logger.close()
    text = capsys.readouterr().out
    for expected in (
        "loss 1.5000, 160 samples/s, entropy 0.7500, in",
        "validation accuracy 1.00% ± 0.10%, entropy 0.5000 (held-out examples)\n",
        "test accuracy      60.00% over 9 tasks (few-shot tasks)\n",
        "test metrics       entropy 0.2500\n",
        "speed              160 samples/s\n",
    ):
        assert expected in text
    assert "tasks/s" not in text


def test_names_in_the_files_of_others_are_no_commands_to_the_terminal(capsys):
    print_plain("class \x1b]52;c;evil\x07 of\n\tfew")
    assert capsys.readouterr().out == "class ?]52;c;evil? of\n\tfew\n"
