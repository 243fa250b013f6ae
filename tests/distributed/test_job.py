"""Jobs: the participating ranks, and the restart count."""

import os
import threading
import time

import pytest
import torch.distributed as dist
from worlds import open_store, run_world

import metadist as todist
from metadist.deadlines import wait_until
from metadist.distributed.heartbeat import FIRST_FAILURE, REPORTED, Heartbeat
from metadist.distributed.job import Job, begin_job
from metadist.distributed.worker_local import WorkerLocal


def begin(run: str, counts: list[int], work: bool) -> tuple[bool, bool, int]:
    import os

    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(counts[todist.get_rank()])
    job = begin_job(10.0, print)
    before = job.has_started(run)
    if todist.get_rank() == 0 and work:
        job.mark_started(run)
    job.end()
    return job.restarted, before, len(job.hosts)


def test_a_restart_of_any_agent_is_one_of_all():
    assert run_world(begin, 2, "run", [0, 0], False) == [(False, False, 2)] * 2
    assert run_world(begin, 3, "run", [0, 2, 0], False) == [(True, False, 3)] * 3


def test_work_that_began_is_remembered_beyond_the_processes():
    store = open_store()
    first = run_world(begin, 2, "run", [0, 0], True, store=store)
    assert first[0] == (False, False, 2)
    # One agent fewer, and no count has risen: a node has left.
    assert run_world(begin, 2, "run", [0, 0], True, store=store) == [(False, True, 2)] * 2
    assert run_world(begin, 2, "other", [0, 0], False, store=store) == [(False, False, 2)] * 2


def arrive_late(seconds: float) -> tuple[str, float]:
    """Rank one comes late; a job's own timeout is shorter than what ranks may arrive apart."""
    if todist.get_rank() == 1:
        time.sleep(seconds)
        return "", 0.0
    start = time.monotonic()
    with pytest.raises(TimeoutError) as caught:
        begin_job(120.0, print, rendezvous_timeout=0.5)
    return str(caught.value), time.monotonic() - start


def test_two_timeouts():
    message, seconds = run_world(arrive_late, 2, 2.0)[0]
    assert "ranks [1]" in message and seconds < 60  # not the job's 120 seconds
    assert run_world(begin_apart, 2, 2.0) == [2, 2]


def begin_apart(seconds: float) -> int:
    if todist.get_rank() == 1:
        time.sleep(seconds)
    job = begin_job(1.0, print, rendezvous_timeout=20.0)
    job.end()
    return len(job.hosts)


def nodes_that_report(directory: str) -> list[bool]:
    """Whether the first rank of each node writes the heartbeats of its node, for rank zero."""
    node = f"{directory}/{todist.get_rank() // 2}"
    os.environ["TORCHELASTIC_ERROR_FILE"] = f"{node}/attempt_0/0/error.json"
    job = begin_job(20.0, print)
    keys = [f"heartbeat/node/{rank}" for rank in range(4)]
    wait_until(lambda: job.store.check([keys[0], keys[2]]), 120.0, pause=0.1)
    found = [job.store.check([key]) for key in keys]
    job.end()
    return found


def test_the_ranks_of_one_agent_are_a_node(tmp_path):
    for node in "01":
        (tmp_path / node).mkdir(mode=0o700)
    two_nodes = {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "none"}
    found = run_world(nodes_that_report, 4, str(tmp_path), environment=two_nodes)
    assert found == [[True, False, True, False]] * 4


def test_a_slow_store_is_reachable_until_the_heartbeat_gives_it_up(monkeypatch):
    class Blocking:
        """A store whose answers never come."""

        def check(self, keys: list[str]) -> bool:
            return go_on.wait(60)

    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    go_on, lost, now = threading.Event(), [], [0.0]
    heartbeat = Heartbeat(dist.HashStore(), ["a", "b"], 20.0, lost.append, lambda: now[0])
    job = Job(Blocking(), ["a", "b"], heartbeat=heartbeat)
    assert job.is_reachable()
    for _ in range(30):  # seconds without a beat
        now[0] += 1
        heartbeat.watch()
    assert "store cannot be reached" in lost[0]
    assert not job.is_reachable()
    go_on.set()


def test_a_new_job_forgets_the_worker_local_values_of_the_one_before():
    job = begin_job(10.0, print)
    values = [job.worker_local("tasks", index) for index in range(2)]
    kept = WorkerLocal("kept", 5)
    assert [each.value for each in values] == [0, 1]
    begin_job(10.0, print).end()
    assert kept.value == 5
    for each in values:
        with pytest.raises(RuntimeError, match="has no value"):
            each.value  # noqa: B018


def test_a_rank_that_waits_for_others_names_the_silent_ones_and_may_take_the_timeout(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    store, lost, now = dist.HashStore(), [], [0.0]
    heartbeat = Heartbeat(store, ["a", "b"], 20.0, lost.append, lambda: now[0])
    job = Job(store, ["a", "b"], heartbeat=heartbeat)
    store.set(FIRST_FAILURE, "1")
    store.set(REPORTED, "yes")
    job.extend_grace("the error")
    assert job.message_if_ended == "the error"
    for second in range(1, 13):
        now[0] = second
        heartbeat.beat(), heartbeat.watch()
        assert job.silent_ranks() == ([] if second < 4 else ["rank 0 on a"])
    assert lost == []
