"""Concurrent jobs: at most as many as allowed, each finished once, all stopped on the way out."""

import signal
import sys
import threading
import time
from typing import ClassVar

import pytest

from metadist.launchers.error_reporting import WorkerGroupFailed
from metadist.launchers.job import JobFailure
from metadist.launchers.pool import JobPool
from metadist.training import Interrupted


class Sleeper:
    """A job that takes `seconds`, or ends when it is stopped.

    It begins when the other jobs that wait at `barrier` run too.
    """

    running = most = 0
    signals: ClassVar[list[int]] = []
    lock = threading.Lock()

    def __init__(
        self, seconds: float, status: int = 0, barrier: threading.Barrier | None = None
    ) -> None:
        self.seconds, self.status, self.stopped = seconds, status, threading.Event()
        self.barrier = barrier

    def run(self) -> int:
        with Sleeper.lock:
            Sleeper.running += 1
            Sleeper.most = max(Sleeper.most, Sleeper.running)
        if self.barrier is not None:
            self.barrier.wait(50)
        stopped = self.stopped.wait(self.seconds)
        with Sleeper.lock:
            Sleeper.running -= 1
        return 143 if stopped else self.status

    def stop(self, number: int) -> None:
        Sleeper.signals.append(number)
        self.stopped.set()


def submit(pool: JobPool, job: Sleeper, max_concurrent: int, finish) -> None:
    pool.submit(job.run, job.stop, max_concurrent, finish)


def test_at_most_as_many_as_allowed_and_each_is_finished():
    Sleeper.most = 0
    pool, ended = JobPool(), []

    def finish(number: int):
        return lambda status: ended.append((number, status))

    pair = threading.Barrier(2)
    for n in range(5):
        submit(pool, Sleeper(0.05, n, pair if n < 2 else None), 2, finish(n))
    pool.join()
    assert sorted(ended) == [(n, n) for n in range(5)] and Sleeper.most == 2
    pool.stop()


def test_join_finishes_every_job():
    pool = JobPool()
    for number in range(3):
        submit(pool, Sleeper(0.02, number), 3, float)
    assert sorted(pool.join()) == [0.0, 1.0, 2.0] and pool.join() == []
    pool.stop()


def test_join_raises_the_failure_of_a_job_while_an_earlier_one_runs():
    def fail(status: int) -> None:
        if status:
            raise JobFailure(WorkerGroupFailed(status), in_job=False)

    pool = JobPool()
    earlier = Sleeper(10)
    submit(pool, earlier, 2, fail)
    submit(pool, Sleeper(0.02, 2), 2, fail)
    with pytest.raises(JobFailure) as failure:
        pool.join()
    assert failure.value.error.exit_status == 2 and not earlier.stopped.is_set()
    pool.stop()
    assert earlier.stopped.is_set()


def test_the_failure_of_a_job_is_raised_before_another_starts():
    def fail(status: int) -> None:
        raise JobFailure(WorkerGroupFailed(status), in_job=False)

    pool = JobPool()
    submit(pool, Sleeper(0.02, 2), 1, fail)
    with pytest.raises(JobFailure):
        submit(pool, Sleeper(60), 1, fail)
    pool.stop()


def test_a_signal_stops_all_jobs(monkeypatch):
    pool = JobPool()
    Sleeper.signals.clear()
    for _ in range(2):
        submit(pool, Sleeper(60), 2, lambda status: None)

    def interrupted(*_, **__):
        monkeypatch.undo()
        raise Interrupted(2, "")

    monkeypatch.setattr("metadist.launchers.pool.wait", interrupted)
    started = time.monotonic()
    with pytest.raises(JobFailure) as failure:
        pool.join()
    assert failure.value.error.exit_status == 130 and Sleeper.signals == [2, 2]
    assert time.monotonic() - started < 30 and Sleeper.running == 0


def test_a_second_signal_ends_the_wait_for_the_jobs(monkeypatch):
    pool = JobPool()
    Sleeper.signals.clear()
    submit(pool, Sleeper(60), 1, lambda status: None)

    def interrupted(*_, **__):
        raise Interrupted(15, "nothing new to save")

    with monkeypatch.context() as patch:
        patch.setattr("metadist.launchers.pool.wait", interrupted)
        with pytest.raises(JobFailure) as failure:  # the workers say what is not saved
            pool.join()
    assert isinstance(failure.value.error, WorkerGroupFailed) and Sleeper.signals == [15]
    assert failure.value.error.exit_status == 143
    pool.stop()


def test_an_exit_while_a_job_is_waited_for_stops_all_jobs(monkeypatch):
    pool = JobPool()
    Sleeper.signals.clear()
    submit(pool, Sleeper(60), 1, lambda status: None)

    def leave(*_, **__):
        monkeypatch.undo()
        sys.exit(3)  # as submitit does when SLURM preempts the job

    monkeypatch.setattr("metadist.launchers.pool.wait", leave)
    with pytest.raises(SystemExit):
        pool.join()
    assert Sleeper.signals == [signal.SIGTERM] and Sleeper.running == 0


def test_what_a_launcher_raises_is_finished_like_an_exit_status():
    class Broken(Sleeper):
        def run(self):
            raise OSError("no space left on the disk")

    pool, ended = JobPool(), []
    submit(pool, Broken(0), 1, ended.append)
    pool.join()
    assert isinstance(ended[0], OSError)
    pool.stop()


def test_a_job_that_failed_is_finished_once():
    def fail(ending):
        ended.append(ending)
        raise JobFailure(OSError("gone"), True)

    pool, ended = JobPool(), []
    submit(pool, Sleeper(0, 3), 1, fail)
    with pytest.raises(JobFailure):
        pool.join()
    pool.stop()
    assert ended == [3]
