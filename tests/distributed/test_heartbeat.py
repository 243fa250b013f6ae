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
from metadist.distributed.heartbeat import (
    FIRST_FAILURE,
    REPORTED,
    STOP,
    Heartbeat,
    WatchPlan,
    watch_plan,
)
from metadist.distributed.job import begin_job, current_job
from metadist.distributed.rendezvous import all_gather_object

TIMEOUT = 3.0


class Lost:
    """What a heartbeat reported."""

    def __init__(self) -> None:
        self.happened = threading.Event()
        self.sentence = ""

    def __call__(self, sentence: str) -> None:
        self.sentence = sentence
        self.happened.set()


def watch(doomed: int, watchers: list[int], how: str) -> str:
    """One rank freezes or dies; the error on the others."""
    lost = Lost()
    job = begin_job(TIMEOUT, lost)
    if todist.get_rank() == doomed:
        job.store.set("pid", str(os.getpid()))
    time.sleep(0.5)
    if todist.get_rank() == doomed:
        if how == "dies":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGSTOP)
    lost.happened.wait(60 if todist.get_rank() in watchers else TIMEOUT + 1)
    if how == "freezes":
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(job.store.get("pid")), signal.SIGKILL)
    return lost.sentence


@pytest.mark.parametrize(("doomed", "how"), [(2, "freezes"), (0, "freezes"), (1, "dies")])
def test_a_rank_without_heartbeat_is_named(doomed, how):
    watchers = [1, 2] if doomed == 0 else [0]
    sentences = run_world(watch, 3, doomed, watchers, how, may_fail=True, timeout=120)
    for rank in watchers:
        assert f"rank {doomed} on {os.uname().nodename}" in sentences[rank]
        assert "no heartbeat" in sentences[rank]
    for rank in {0, 1, 2} - {doomed, *watchers}:
        assert sentences[rank] == ""  # rank zero sees to it


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


# --- two heartbeats in this process, with a clock of the test's -------------------------------


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Ranks:
    """Heartbeats of several ranks that share a store, without threads."""

    def __init__(
        self, monkeypatch, size: int = 2, timeout: float = 20.0, leaders: list[int] | None = None
    ) -> None:
        self.clock, self.store = Clock(), dist.HashStore()
        self.lost: list[list[str]] = [[] for _ in range(size)]
        self.beats = []
        for rank in range(size):
            monkeypatch.setenv("RANK", str(rank))
            monkeypatch.setenv("WORLD_SIZE", str(size))
            hosts = [f"host{each}" for each in range(size)]
            args = (self.store, hosts, timeout, self.lost[rank].append, self.clock)
            self.beats.append(Heartbeat(*args, leaders=leaders))

    def run(self, seconds: float, *ranks: int) -> None:
        """So many seconds pass, in which these ranks live."""
        end = self.clock.now + seconds
        while self.clock.now < end - 1e-9:
            self.clock.now += min(self.beats[0].interval, end - self.clock.now)
            for rank in ranks:
                self.beats[rank].beat()
                self.beats[rank].watch()


@pytest.fixture
def ranks(monkeypatch) -> Ranks:
    return Ranks(monkeypatch)


@pytest.mark.parametrize(("doomed", "watcher"), [(0, 1), (1, 0)])
def test_a_lost_rank_is_found_within_the_timeout_and_not_much_before(ranks, doomed, watcher):
    ranks.run(100, 0, 1)
    ranks.run(17.9, watcher)
    assert ranks.lost == [[], []]
    ranks.run(2, watcher)  # 19.9 of 20 seconds
    (sentence,) = ranks.lost[watcher]
    assert f"rank {doomed} on host{doomed} was lost: no heartbeat" in sentence
    assert ranks.lost[doomed] == []


@pytest.mark.parametrize(
    ("doomed", "watchers"), [(0, [1, 2, 4]), (1, [0]), (2, [0, 3]), (3, [2]), (5, [4])]
)
def test_ranks_on_several_nodes_are_found_in_time(monkeypatch, doomed, watchers):
    ranks = Ranks(monkeypatch, 6, leaders=[0, 0, 2, 2, 4, 4])
    others = [rank for rank in range(6) if rank != doomed]
    ranks.run(100, *range(6))
    ranks.run(17.9, *others)
    assert ranks.lost == [[]] * 6
    ranks.run(2, *others)  # 19.9 of 20 seconds
    for rank in watchers:
        assert f"rank {doomed} on host{doomed} was lost: no heartbeat" in ranks.lost[rank][0]
    assert all(f"rank {doomed} " in "".join(lost[:1]) for lost in ranks.lost if lost)
    ranks.run(2, 0)  # it knows one heartbeat later what another node's first rank knows
    assert doomed == 0 or f"rank {doomed} on" in ranks.lost[0][0]


@pytest.mark.parametrize("leaders", [[0, 1, 2], [0, 0, 0]])
def test_a_rank_that_dies_before_its_first_heartbeat_hides_no_other_rank(monkeypatch, leaders):
    ranks = Ranks(monkeypatch, 3, leaders=leaders)
    ranks.store.delete_key("heartbeat/1")
    ranks.run(10, 0, 2)
    assert ranks.lost == [[]] * 3
    assert ranks.beats[0].silent_ranks(5.0) == [1]
    ranks.run(9.9, 0)  # 19.9 of 20 seconds
    assert "rank 1 on host1 was lost: no heartbeat" in ranks.lost[0][0]
    assert ranks.beats[0].silent_ranks(5.0) == [1, 2]


def test_a_node_whose_first_rank_finished_is_not_missed(monkeypatch):
    ranks = Ranks(monkeypatch, 4, leaders=[0, 0, 2, 2])
    ranks.run(5, 0, 1, 2, 3)
    assert ranks.beats[0].silent_ranks(3.0) == []
    ranks.beats[2].end()
    ranks.run(60, 0, 1, 3)
    assert ranks.lost == [[]] * 4


def test_rank_zero_knows_every_silent_rank(monkeypatch):
    ranks = Ranks(monkeypatch, 4, leaders=[0, 0, 2, 2])
    ranks.run(5, 0, 1, 2, 3)
    ranks.run(6, 0, 2)
    assert ranks.beats[0].silent_ranks(3.0) == [1, 3]


def test_a_rank_that_returns_in_time_is_not_lost(ranks):
    for _ in range(5):
        ranks.run(15, 0)
        assert ranks.beats[0].silent_ranks(12.0) == [1]
        ranks.run(2, 0, 1)
        assert ranks.beats[0].silent_ranks(12.0) == []
    assert ranks.lost == [[], []]


@pytest.mark.parametrize("first", ["beat", "watch"])
def test_a_rank_that_was_suspended_gives_the_others_the_whole_time(ranks, first):
    ranks.run(10, 0, 1)
    ranks.clock.now += 60  # rank zero is stopped, and continued
    getattr(ranks.beats[0], first)()
    assert ranks.lost == [[], []]
    ranks.run(17, 0)
    assert ranks.lost == [[], []]
    ranks.run(3, 0)
    assert len(ranks.lost[0]) == 1


def test_a_store_that_does_not_answer_is_noticed_beside_the_beat_that_waits_for_it(ranks):
    ranks.run(10, 0, 1)
    for _ in range(17):  # `beat` does not return
        ranks.clock.now += 1
        ranks.beats[1].watch()
    assert ranks.lost == [[], []]
    for _ in range(2):
        ranks.clock.now += 1
        ranks.beats[1].watch()
    (sentence,) = ranks.lost[1]
    assert "the job's store cannot be reached from host1 (no answer for 19 s)" in sentence


def test_the_death_of_torchruns_agent_is_noticed(ranks, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    ranks.run(2, 0, 1)
    assert ranks.lost == [[], []]
    monkeypatch.setattr(os, "getppid", lambda: 1)
    ranks.run(1, 1)
    assert ranks.lost == [[], ["torchrun's agent, which started this process, died."]]


def test_without_torchrun_another_parent_means_nothing(ranks, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setattr(os, "getppid", lambda: 1)
    ranks.run(5, 0, 1)
    assert ranks.lost == [[], []]


def test_a_store_that_is_gone_is_noticed(ranks, monkeypatch):
    class Gone:
        def __getattr__(self, name: str):
            raise RuntimeError("Connection reset by peer\nand more")

    monkeypatch.setenv("RANK", "1")
    lost: list[str] = []
    store = dist.HashStore()

    class Breaking:
        def __getattr__(self, name: str):
            return getattr(store if not broken else Gone(), name)

    broken = False
    beat = Heartbeat(Breaking(), ["a", "b"], 20.0, lost.append, ranks.clock)
    beat.beat()
    broken = True
    beat.beat()
    beat.beat()  # said once
    assert lost == ["the job's store cannot be reached (Connection reset by peer)."]
    raised: list[object] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    beat.end()
    assert raised == []


def test_a_rank_that_finished_is_not_missed(ranks):
    ranks.run(5, 0, 1)
    ranks.beats[1].end()
    ranks.run(60, 0)
    assert ranks.lost == [[], []]
    ranks.beats[1].beat()  # one that was under way does not undo the end
    ranks.run(60, 0)
    ranks.run(30, 1)  # it no longer expects an answer of the store
    assert ranks.lost == [[], []]


def test_a_beat_under_way_does_not_undo_the_end(monkeypatch):
    class SlowStore:
        """A store in which the write of a counter takes until after an end that does not wait."""

        store, writing, finished = dist.HashStore(), threading.Event(), threading.Event()

        def set(self, key: str, value: str) -> None:
            if value == "1":
                self.writing.set()
                self.finished.wait(1)
            self.store.set(key, value)
            if value == "finished":
                self.finished.set()

        def __getattr__(self, name: str) -> object:
            return getattr(self.store, name)

    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    slow = SlowStore()
    beat = Heartbeat(slow, ["a", "b"], 20.0, lambda _: None, Clock())
    writer = threading.Thread(target=beat.beat)
    writer.start()
    assert slow.writing.wait(10)
    beat.end()
    writer.join(10)
    assert slow.store.get("heartbeat/1") == b"finished"


def test_a_beat_under_way_does_not_undo_the_end_of_a_node(monkeypatch):
    ranks = Ranks(monkeypatch, 4, leaders=[0, 0, 2, 2])
    leader = ranks.beats[2]
    monkeypatch.setattr(leader, "_pass_signals", leader.end)  # before it writes its node's value
    leader.beat()
    assert ranks.store.get("heartbeat/node/2") == b"finished"


def test_the_end_does_not_wait_for_a_store_that_does_not_answer(monkeypatch):
    class Blocking:
        """A store in which the last write hangs."""

        store, go_on, finished = dist.HashStore(), threading.Event(), threading.Event()

        def set(self, key: str, value: str) -> None:
            if value == "finished":
                self.go_on.wait(20)
                self.finished.set()

    monkeypatch.setattr(heartbeat, "_GRACE_SECONDS", 0.01)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    store = Blocking()
    Heartbeat(store, ["a", "b"], 20.0, lambda _: None, Clock()).end()
    assert not store.finished.is_set()
    store.go_on.set()


def test_short_timeouts_have_more_heartbeats(monkeypatch):
    intervals = [Ranks(monkeypatch, timeout=each).beats[0].interval for each in (4.0, 20.0, 300.0)]
    assert intervals == [0.2, 1.0, 1.0]


def test_after_a_failure_that_is_reported_the_others_have_five_seconds_to_exit(ranks):
    ranks.run(5, 0, 1)
    ranks.store.set(FIRST_FAILURE, "1")
    ranks.store.set(REPORTED, "yes")
    ranks.run(4.9, 0, 1)
    assert ranks.lost == [[], []]
    ranks.run(2.2, 0, 1)
    assert ranks.lost == [[""], [""]]  # another rank has said why


def test_a_rank_that_asks_for_it_has_the_whole_timeout_to_exit(ranks):
    ranks.store.set(FIRST_FAILURE, "1")
    ranks.store.set(REPORTED, "yes")
    ranks.beats[0].extend_grace()
    ranks.run(8, 0, 1)
    assert ranks.lost == [[], [""]]


def test_who_failed_first_has_the_whole_timeout_to_report_it(ranks):
    ranks.run(5, 0, 1)
    ranks.store.set(FIRST_FAILURE, "1")
    ranks.run(8, 0, 1)
    assert ranks.lost == [[""], []]  # its traceback is long, its strategy closes slowly
    ranks.store.set(REPORTED, "yes")
    ranks.run(1, 1)
    assert ranks.lost == [[""], [""]]


def test_a_rank_that_is_lost_after_a_failure_is_not_reported(ranks):
    ranks.run(5, 0, 1)
    ranks.store.set(FIRST_FAILURE, "0")
    ranks.store.set(REPORTED, "yes")
    ranks.beats[1].extend_grace()
    ranks.run(19.5, 1)
    assert ranks.lost == [[], [""]]


def test_who_failed_first_and_never_reports_it_is_ended_too(ranks):
    ranks.store.set(FIRST_FAILURE, "0")
    ranks.run(20, 0, 1)
    assert ranks.lost[0] == []
    ranks.run(3, 0, 1)
    assert ranks.lost[0] == [""]


def test_a_signal_to_one_rank_reaches_rank_zero(ranks):
    ranks.run(1, 0, 1)
    assert ranks.beats[0].received_stop_signal == 0
    ranks.beats[1].stop_signal = 15
    ranks.run(2, 0, 1)
    assert [beat.received_stop_signal for beat in ranks.beats] == [15, 0]


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
    beat = Heartbeat(store, ["a", "b"], 20.0, lambda _: None, Clock())
    beat.stop_signal = 15
    for _ in range(10):
        beat.beat()
    assert store.get(STOP) == b"15" and store.writes[STOP] == 1
    assert store.writes["heartbeat/1"] == 11


def request_stop_on_rank_one() -> int:
    job = begin_job(TIMEOUT, Lost())
    if todist.get_rank() == 1:
        job.request_stop(15)
    until = time.monotonic() + 120
    while todist.get_rank() == 0 and not job.stop_signal and time.monotonic() < until:
        time.sleep(0.01)
    wait_for_all(job)
    return current_job().stop_signal


def test_a_stop_signal_is_known_on_its_rank_and_on_rank_zero():
    assert run_world(request_stop_on_rank_one, 3) == [15, 15, 0]


def claim() -> tuple:
    job = begin_job(60.0, Lost())
    if todist.get_rank() == 0:
        while not job.has_first_failure():
            time.sleep(0.01)
    owns = job.claim_first_failure()
    if todist.get_rank() == 1:
        job.mark_reported()
    wait_for_all(job)
    return owns, job.owns_first_failure, job.is_reported()


def test_the_first_failure_is_one_ranks():
    assert run_world(claim, 2) == [(False, False, True), (True, True, True)]


def wait_for_all(job) -> None:
    all_gather_object(job.store, "done", None, timeout=60.0)


@pytest.mark.parametrize(
    ("rank", "plan"),
    [
        (0, WatchPlan([0, 1], {2: [2, 3], 4: [4]}, True, [1, 2, 3, 4])),
        (1, WatchPlan([0], {}, False, [0])),
        (2, WatchPlan([2, 3], {0: [0, 1]}, True, [0, 3])),
        (4, WatchPlan([4], {0: [0, 1]}, True, [0])),
    ],
)
def test_first_ranks_watch_their_node_and_rank_zero_all_ranks(rank, plan):
    assert watch_plan(rank, [0, 0, 2, 2, 4]) == plan


def test_on_one_node_the_ranks_watch_the_first_one():
    assert watch_plan(0, [0, 0, 0]) == WatchPlan([0, 1, 2], {}, False, [1, 2])
    assert watch_plan(2, [0, 0, 0]) == WatchPlan([0], {}, False, [0])
