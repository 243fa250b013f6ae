"""The interface of loggers, and several loggers as one."""

import os
import subprocess
import sys
import typing

import pytest
import torch
from example_runs import example_run

from metadist.errors import UserError
from metadist.loggers import (
    ConsoleLogger,
    JsonlLogger,
    Logger,
    LoggerCollection,
    TensorBoardLogger,
    WandbLogger,
)
from metadist.loggers.logger import saved_run_id


@pytest.mark.parametrize(
    ("start", "content", "expected"),
    [(2, b"0a1b\n", "0a1b"), (0, b"0a1b\n", ""), (2, b"../a", ""), (2, b"\xff", "")],
)
def test_the_id_of_a_service_is_kept_in_a_resumed_run(tmp_path, start, content, expected):
    run = example_run(tmp_path, start)
    assert saved_run_id(run, "id", 4) == ""
    (tmp_path / "id").write_bytes(content)
    assert saved_run_id(run, "id", 4) == expected


def test_the_id_of_a_service_is_not_read_from_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "id")
    with pytest.raises(OSError, match="it is a pipe"):
        saved_run_id(example_run(tmp_path, 2), "id", 4)


def test_flushed_metrics_survive_the_death_of_the_process(tmp_path):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        loggers = LoggerCollection([JsonlLogger(), TensorBoardLogger()])
        loggers.start(example_run(tmp_path))
        loggers.log_metrics({"iteration": 1, "train_loss": 0.5})
        loggers.flush()
        os.write(writer, b"x")
        os._exit(0)  # as if killed: nothing is closed
    assert os.read(reader, 1) == b"x"
    os.waitpid(child, 0)
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert b"train/loss" in events.read_bytes()
    assert b"train_loss" in (tmp_path / "metrics.jsonl").read_bytes()


def test_messages_are_shown_if_there_is_a_console(tmp_path, capsys):
    assert not LoggerCollection([JsonlLogger(), Logger()]).log_message("a task went wrong")
    both = LoggerCollection([ConsoleLogger(), JsonlLogger()])
    both.start(example_run(tmp_path))
    assert both.log_message("a task went wrong")
    both.close()
    assert "warning: a task went wrong\n" in capsys.readouterr().out


def test_a_message_reaches_every_logger():
    messages = []

    class Listener(Logger):
        def log_message(self, text):
            messages.append(text)
            return True

    assert LoggerCollection([Listener(), Listener()]).log_message("both") is True
    assert messages == ["both", "both"]


def test_loggers_are_called_in_order_and_all_closed():
    calls = []

    class Recorder(Logger):
        def __init__(self, name, fails=False):
            self.name, self.fails = name, fails

        def start(self, run):
            calls.append(f"start {self.name}")

        def log_metrics(self, metrics):
            calls.append(f"log_metrics {self.name}")

        @property
        def shows_panels(self):
            return self.name == "b"

        def log_panels(self, iteration, values, images):
            calls.append(f"log_panels {self.name}")

        def flush(self):
            calls.append(f"flush {self.name}")

        def finish(self, results, plots):
            calls.append(f"finish {self.name}")

        def close(self):
            calls.append(f"close {self.name}")
            if self.fails:
                raise RuntimeError("an error")

    loggers = LoggerCollection([Recorder("a", fails=True), Recorder("b"), Logger()])
    loggers.start(None)
    loggers.log_metrics({"iteration": 1})
    loggers.log_panels(1, {}, [])
    loggers.flush()
    loggers.finish({}, [])
    assert loggers.shows_panels and not LoggerCollection([Logger()]).shows_panels
    loggers.close()
    methods = ("start", "log_metrics", "log_panels", "flush", "finish", "close")
    assert calls == [f"{method} {name}" for method in methods for name in "ab"]


@pytest.mark.parametrize("logger", [JsonlLogger, ConsoleLogger, TensorBoardLogger, WandbLogger])
def test_close_is_safe_before_start_and_parameters_are_typed(logger):
    logger().close()
    typing.get_type_hints(logger.__init__)


def test_importing_the_package_imports_nothing_heavy():
    code = (
        "import sys, metadist.loggers; "
        "heavy = {'matplotlib', 'tensorboard', 'wandb', 'rich.live'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=180, env=os.environ
    )
    assert out.stdout.strip() == "[]", out.stderr


def test_a_method_that_is_almost_one_of_the_interface_is_refused():
    with pytest.raises(TypeError, match=r"Mine\.log_metric is no method of Logger \(did you mean"):
        type("Mine", (Logger,), {"log_metric": lambda self, metrics: None})
    type("Mine", (Logger,), {"log_image": lambda self: None, "log_metrics": lambda self, _: None})
    type("Mine", (Logger,), {"_flush": lambda self: None, "closed": property(lambda self: True)})


def test_metrics_without_an_iteration_are_refused():
    with pytest.raises(UserError, match=r'the metrics \(train_x\) have no iteration.*"iteration"'):
        LoggerCollection([]).log_metrics({"train_x": 1.0})


@pytest.mark.parametrize(
    ("value", "found"), [(torch.ones(3), r"an array of shape \(3,\)"), ([1.0, 2.0], "list")]
)
def test_metrics_that_are_no_numbers_are_refused_by_name(value, found):
    with pytest.raises(UserError, match=rf"the metric train_x is no number \({found}\)"):
        LoggerCollection([]).log_metrics({"iteration": 1, "train_x": value})
    LoggerCollection([]).log_metrics({"iteration": 1, "train_x": torch.ones(())})
