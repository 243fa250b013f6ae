"""Frozen and dead ranks are detected; busy and finished ranks are not."""

import contextlib
import os
import signal
import threading
import time
from collections import Counter

import pytest
import torch.distributed as dist
from worlds import run_world

import metadist as todist
from metadist.distributed import heartbeat
from metadist.distributed.job import begin_job, current_job

TIMEOUT = 3.0


class Lost:
    """What a heartbeat reported."""

    def __init__(self) -> None:
        self.happened = threading.Event()
        self.sentence = ""

    def __call__(self, sentence: str) -> None:
        self.sentence = sentence
        self.happened.set()


def watch(doomed: int, how: str) -> tuple[str, float] | None:
    """One rank freezes or dies; the error on the others, and the seconds until it."""
    lost = Lost()
    job = begin_job(TIMEOUT, lost)
    if todist.get_rank() == doomed:
        job.store.set("pid", str(os.getpid()))
    time.sleep(0.5)
    if todist.get_rank() == doomed:
        if how == "dies":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGSTOP)
    start = time.monotonic()
    lost.happened.wait(TIMEOUT + 1)
    seconds = time.monotonic() - start
    if how == "freezes":
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(job.store.get("pid")), signal.SIGKILL)
    return lost.sentence, seconds


@pytest.mark.parametrize(("doomed", "how"), [(2, "freezes"), (0, "freezes"), (1, "dies")])
def test_a_rank_without_signs_of_life_is_named_in_time(doomed, how):
    outcomes = run_world(watch, 3, doomed, how, may_fail=True, timeout=10)
    watchers = [1, 2] if doomed == 0 else [0]
    for rank in watchers:
        sentence, seconds = outcomes[rank]
        assert f"rank {doomed} on {os.uname().nodename}" in sentence and "no heartbeat" in sentence
        assert seconds < TIMEOUT + 1
    for rank in {0, 1, 2} - {doomed, *watchers}:
        assert outcomes[rank][0] == ""  # rank zero sees to it


def compute_and_finish_early() -> str:
    lost = Lost()
    job = begin_job(TIMEOUT, lost)
    if todist.get_rank() == 1:
        until = time.monotonic() + 1.5 * TIMEOUT
        while time.monotonic() < until:  # a long task that never rests
            sum(range(1000))
    elif todist.get_rank() == 0:
        time.sleep(2.5 * TIMEOUT)
    job.end()
    return lost.sentence


def test_a_long_task_and_an_early_end_are_no_faults():
    assert run_world(compute_and_finish_early, 3) == ["", "", ""]


def name_a_cause() -> tuple:
    heartbeat._GRACE_SECONDS = 0.5
    lost = Lost()
    job = begin_job(TIMEOUT, lost)
    if todist.get_rank() == 1:
        owns = job.claim_first_failure()
        job.mark_reported()
        time.sleep(2.0)
    else:
        while not job.has_first_failure():
            time.sleep(0.01)
        owns = job.claim_first_failure()
        assert lost.happened.wait(3)  # whoever goes on all the same is to be ended
    return owns, job.owns_first_failure, job.is_reported(), lost.sentence


def test_the_first_cause_is_one_ranks_and_ends_the_others():
    zero, one = run_world(name_a_cause, 2)
    assert one[:3] == (True, True, True)
    assert zero == (False, False, True, "")


def pass_a_signal_on() -> int:
    job = begin_job(TIMEOUT, Lost())
    if todist.get_rank() == 1:
        job.request_stop(15)
    until = time.monotonic() + 3
    while todist.get_rank() == 0 and not job.stop_signal and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(0.5)
    return current_job().stop_signal


def test_a_signal_to_one_rank_reaches_rank_zero():
    assert run_world(pass_a_signal_on, 2) == [15, 0]


class SlowStore:
    """A store in which a write of a counter takes its time."""

    def __init__(self) -> None:
        self.store = dist.HashStore()
        self.writing = threading.Event()

    def set(self, key: str, value: str) -> None:
        if value.isdigit() and value != "0":
            self.writing.set()
            time.sleep(0.5)
        self.store.set(key, value)

    def __getattr__(self, name: str) -> object:
        return getattr(self.store, name)


def test_a_late_beat_does_not_undo_the_end(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    store, lost = SlowStore(), Lost()
    beat = heartbeat.Heartbeat(store, ["here", "there"], 1.0, lost)
    beat.start()
    assert store.writing.wait(5)
    beat.end()
    time.sleep(1.0)
    assert not store.get("heartbeat/1").isdigit() and not lost.happened.is_set()


class CountingStore:
    """A store that counts how often a key is written."""

    def __init__(self) -> None:
        self.store = dist.HashStore()
        self.writes: Counter[str] = Counter()

    def set(self, key: str, value: str) -> None:
        self.writes[key] += 1
        self.store.set(key, value)

    def __getattr__(self, name: str) -> object:
        return getattr(self.store, name)


def test_a_signal_is_written_once(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    store = CountingStore()
    store.store.set("heartbeat/0", "finished")  # rank zero is not expected
    beat = heartbeat.Heartbeat(store, ["here", "there"], 1.0, Lost())
    beat.stop_signal = 15
    beat.start()
    deadline = time.monotonic() + 20
    while store.writes["heartbeat/1"] < 10 and time.monotonic() < deadline:
        time.sleep(0.01)
    beat.end()
    assert store.get(heartbeat.STOP) == b"15" and store.writes[heartbeat.STOP] == 1


def report_slowly() -> tuple:
    heartbeat._GRACE_SECONDS = 0.2
    lost = Lost()
    job = begin_job(TIMEOUT, lost)
    job.store.set(f"pid/{todist.get_rank()}", "here")
    if todist.get_rank() == 1:
        job.claim_first_failure()
        time.sleep(1.5)  # its traceback is long, its strategy closes slowly
        ended_before = lost.happened.is_set()
        job.mark_reported()
        lost.happened.wait(3)
        return ended_before, lost.happened.is_set()
    lost.happened.wait(3)
    return lost.happened.is_set(), lost.sentence


def test_who_failed_first_is_not_ended_before_it_has_reported():
    assert run_world(report_slowly, 2) == [(True, ""), (False, True)]
