"""Signals: noted, passed on, and obeyed in training, validation and waiting."""

import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import DictConfig
from tiny import SMALL, compose, records, train, without_times
from worlds import run_world

from metadist.config import build_experiment
from metadist.distributed import get_rank
from metadist.distributed.job import begin_job
from metadist.reports.run_record import RunRecord
from metadist.tasks import key_split
from metadist.training import Interrupted, Trainer
from metadist.training import signals as signals_module
from metadist.training.signals import StopSignals


def signal_one(directory: Path, rank: int, configuration: DictConfig, after: int) -> str:
    """Train for long; one rank alone gets SIGTERM once there are `after` records."""
    job = begin_job(20.0, lambda sentence: os._exit(9))
    x = build_experiment(configuration, directory, "maml")

    def send() -> None:
        while not ((directory / "metrics.jsonl").exists() and len(records(directory)) >= after):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    if get_rank() == rank:
        threading.Thread(target=send, daemon=True).start()
    try:
        Trainer(x).run()
    except Interrupted as error:
        return f"{type(error).__name__} {getattr(error, 'exit_status', '')} {error}"
    finally:
        job.end()
    return "finished"


@pytest.mark.parametrize(
    ("strategy", "rank"),
    [("rpc", 1), pytest.param("rpc", 0, marks=pytest.mark.slow), ("allreduce", 1)],
)
def test_a_signal_to_any_one_rank_saves_and_ends_all(tmp_path, strategy, rank):
    long = ("trainer.iterations=100000", "trainer.eval_every=0")
    configuration = compose(*SMALL, f"strategy={strategy}", *long)
    zero, one = run_world(signal_one, 2, tmp_path, rank, configuration, 3)
    assert zero.startswith("Interrupted 143 stopped at iteration"), zero
    assert one.startswith("Interrupted 143") if strategy == "allreduce" else one == "finished"
    assert list((tmp_path / "checkpoints").glob("iteration-*.pt"))


MANY = ("strategy=local", "trainer.validation_tasks=65", "trainer.iterations=3")


def interrupted_in(split: str, directory: Path, configuration: DictConfig) -> str:
    x = build_experiment(configuration, directory, "maml")
    map_tasks = x.strategy.map_tasks

    def map_and_stop(mapper, learner, batch):
        if key_split(batch.keys[0]) == split:
            os.kill(os.getpid(), signal.SIGTERM)
        return map_tasks(mapper, learner, batch)

    x.strategy.map_tasks = map_and_stop
    try:
        Trainer(x).run()
    except Interrupted as error:
        return str(error)
    return "finished"


def test_a_signal_during_validation_saves_and_the_resumed_run_validates_anew(tmp_path):
    many = compose(*SMALL, *MANY)
    message = run_world(interrupted_in, 1, "validation", tmp_path / "parts", many)[0]
    assert message.startswith("stopped at iteration 2 of 3, saved"), message
    assert not any("validation_loss" in line for line in records(tmp_path / "parts"))
    train(str(tmp_path / "parts"), *MANY, "resume=auto")
    train(str(tmp_path / "whole"), *MANY)
    parts, whole = records(tmp_path / "parts"), records(tmp_path / "whole")
    assert without_times(parts) == without_times(whole)


def test_a_signal_during_the_test_ends_the_run_without_results(tmp_path):
    message = run_world(interrupted_in, 1, "test", tmp_path, compose(*SMALL, "strategy=local"))[0]
    assert message.startswith("stopped at iteration 4 of 4, saved"), message
    assert not (tmp_path / "results.json").exists()


def signalled(seconds: float, *numbers: int, error_file: Path | None = None) -> tuple:
    """Signals to this process, so many seconds apart."""
    now = 0.0
    before = signal.getsignal(signal.SIGTERM)
    signals_module.time = SimpleNamespace(monotonic=lambda: now)
    stop = StopSignals(error_file)
    with stop.recorded():
        first = stop.number
        for number in numbers:
            now += seconds
            os.kill(os.getpid(), number)
        inside = stop.number
    return first, inside, signal.getsignal(signal.SIGTERM) == before


def test_the_first_signal_counts_and_repetitions_within_a_second_are_one():
    both = (signal.SIGTERM, signal.SIGINT, signal.SIGTERM)
    assert run_world(signalled, 1, 0.4, *both) == [(0, signal.SIGTERM, True)]
    assert run_world(signalled, 1, 0.4, signal.SIGINT) == [(0, signal.SIGINT, True)]
    assert run_world(status_after_signals, 1, 1.1, *both[::2]) == [-signal.SIGTERM]


def status_after_signals(seconds: float, *numbers: int) -> int:
    """The exit status of a process to which `signalled` sends signals."""
    if (child := os.fork()) == 0:
        try:
            signalled(seconds, *numbers)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def signalled_with_lines(directory: Path, seconds: float, *numbers: int) -> None:
    """`signalled`, with the standard error and the error file of each rank in a directory."""
    os.dup2(os.open(directory / f"err{get_rank()}", os.O_CREAT | os.O_WRONLY), 2)
    signalled(seconds, *numbers, error_file=directory / "error.txt")


def test_rank_zero_prints_a_line_for_the_first_signal(tmp_path):
    run_world(signalled_with_lines, 2, tmp_path, 0.4, signal.SIGINT, signal.SIGTERM)
    assert (tmp_path / "err0").read_text() == (
        "stopping after this iteration; a second Ctrl-C or SIGTERM ends the run now, without a "
        "checkpoint\n"
    )
    assert (tmp_path / "err1").read_text() == "" and not (tmp_path / "error.txt").exists()


def test_rank_zero_prints_and_records_that_a_second_signal_ends_the_run(tmp_path):
    numbers = (signal.SIGINT, signal.SIGINT)
    run_world(signalled_with_lines, 2, tmp_path, 1.1, *numbers, may_fail=True)
    error = "stopped by a second signal: the iterations since the last checkpoint are not saved\n"
    assert (tmp_path / "err0").read_text().splitlines(keepends=True)[1:] == [error]
    assert (tmp_path / "error.txt").read_text() == error
    assert RunRecord(tmp_path).status(0.0) == "stopped"
    assert (tmp_path / "err1").read_text() == ""


def test_the_sigterm_of_torchrun_is_not_printed(tmp_path):
    torchrun = {"TORCHELASTIC_RUN_ID": "1"}
    run_world(signalled_with_lines, 1, tmp_path, 0.4, signal.SIGTERM, environment=torchrun)
    assert (tmp_path / "err0").read_text() == ""


def test_outside_of_the_main_thread_the_handlers_stay():
    before, inside = signal.getsignal(signal.SIGTERM), []

    def enter() -> None:
        stop = StopSignals()
        with stop.recorded():
            inside.append((stop.number, signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert inside == [(0, before)] and signal.getsignal(signal.SIGTERM) == before


def test_the_exit_status_of_an_interrupted_run():
    assert [Interrupted(number, "").exit_status for number in (2, 15)] == [130, 143]
