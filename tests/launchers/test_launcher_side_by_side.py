"""Worlds at the same time: never more than asked, each settled once, all ended on the way out."""

import threading
import time
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from metadist.config import build_experiment
from metadist.errors import UserError
from metadist.launchers import Launcher, PlannedRun
from metadist.launchers.carry_out import Failed
from metadist.launchers.error_reporting import WorkerGroupFailed
from metadist.launchers.side_by_side import SideBySide
from metadist.launchers.sweeps import on_failure_of
from metadist.launchers.task_function import _end
from metadist.training import Interrupted


class Sleeper(Launcher):
    """A run of it takes `seconds`, or ends when it is told to."""

    now = most = 0
    lock = threading.Lock()

    def __init__(self, seconds: float, status: int = 0) -> None:
        self.seconds, self.status, self.told = seconds, status, threading.Event()

    def check(self, configuration):
        pass

    def run(self, planned):
        with Sleeper.lock:
            Sleeper.now += 1
            Sleeper.most = max(Sleeper.most, Sleeper.now)
        stopped = self.told.wait(self.seconds)
        with Sleeper.lock:
            Sleeper.now -= 1
        return 143 if stopped else self.status

    def stop(self, number):
        self.told.set()


RUN = PlannedRun(Path("x"), "x", Path("x"), OmegaConf.create(), (), (), build_experiment)


def test_at_most_so_many_at_a_time_and_each_figure_is_its_own():
    Sleeper.most = 0
    worlds, ended = SideBySide(), []

    def finish(number: int):
        def note(status: int) -> float:
            ended.append(number)
            return number + status / 100

        return note

    figures = [worlds.start(Sleeper(0.05, n), RUN, 2, finish(n)) for n in range(5)]
    assert [float(figure) for figure in figures] == [0, 1.01, 2.02, 3.03, 4.04]
    assert [float(figure) for figure in figures] == [0, 1.01, 2.02, 3.03, 4.04]
    assert sorted(ended) == [0, 1, 2, 3, 4] and Sleeper.most == 2
    worlds.stop()


def test_a_job_without_a_figure_is_no_number():
    worlds = SideBySide()
    with pytest.raises(TypeError, match="no figure"):
        float(worlds.start(Sleeper(0), RUN, 1, lambda status: None))


def test_what_ends_a_sweep_is_raised_before_another_job_starts():
    def stop(status: int) -> None:
        raise Failed(WorkerGroupFailed(status), in_job=False)

    worlds = SideBySide()
    worlds.start(Sleeper(0.02, 2), RUN, 1, stop)
    with pytest.raises(Failed):
        worlds.start(Sleeper(60), RUN, 1, stop)
    worlds.stop()


def test_a_signal_ends_all_worlds(monkeypatch):
    worlds = SideBySide()
    figures = [worlds.start(Sleeper(60), RUN, 2, lambda status: None) for _ in range(2)]

    def interrupted(*_, **__):
        monkeypatch.undo()
        raise Interrupted(2, "")

    monkeypatch.setattr("metadist.launchers.side_by_side.wait", interrupted)
    started = time.monotonic()
    with pytest.raises(Failed) as failed:
        figures[0].settle()
    assert failed.value.error.exit_status == 130
    assert time.monotonic() - started < 30 and all(figure.done() for figure in figures)


def test_what_a_launcher_raises_is_handed_on_like_an_exit_status():
    class Broken(Sleeper):
        def run(self, planned):
            raise OSError("no room on the disk")

    worlds, ended = SideBySide(), []
    worlds.start(Broken(0), RUN, 1, ended.append).settle()
    assert isinstance(ended[0], OSError)
    with pytest.raises(Failed, match="no room on the disk") as failed:
        _end(RUN, ended[0])
    assert failed.value.error is ended[0]
    worlds.stop()


@pytest.mark.parametrize("value", ["continue", 1])
def test_a_sweep_without_options_is_refused(value):
    with pytest.raises(UserError, match=f"sweep={value} does not fit: write sweep.on_failure="):
        on_failure_of(OmegaConf.create({"sweep": value}))
