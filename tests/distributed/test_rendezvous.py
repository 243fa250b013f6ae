"""A rendezvous has live processes only, whatever dead processes left in the store."""

import json
import os
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch.distributed as dist
from worlds import RankFailed, open_store, run_world

import metadist as todist
from metadist.distributed.errors import RendezvousClosedError, RendezvousTimeoutError
from metadist.distributed.rendezvous import (
    all_gather_object,
    host_rendezvous,
    join_rendezvous,
    rendezvous,
    report_object,
)


def generation(number: int, crash: bool) -> int:
    """One restart: rendezvous, call each other once, and finish or die in between."""
    todist.init_rpc()
    rank, size = todist.get_rank(), todist.get_world_size()
    answer = todist.remote_sync_call(pow, args=(number, 2), partitioner=(rank + 1) % size)
    if crash:
        todist.barrier()  # all have their answers, and the store is full of addresses
        os._exit(1)
    todist.shutdown_rpc()
    return answer


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_ten_generations_of_processes_meet_on_one_store(size):
    store = open_store()
    for number in range(10):
        crash = number % 2 == 0
        outcomes = run_world(generation, size, number, crash, store=store, may_fail=True)
        if crash:
            # Who is last in the barrier may see that the first has died already, and say so.
            assert all(isinstance(each, ProcessLookupError | RankFailed) for each in outcomes)
            assert any(isinstance(each, ProcessLookupError) for each in outcomes)
        else:
            assert outcomes == [number**2] * size


def rendezvous_and_gather(topic: str) -> list[str]:
    store = rendezvous(topic, timeout=60)
    return all_gather_object(store, "pid", f"{todist.get_rank()}:{os.getpid()}", timeout=60)


def join_alone(only: int) -> str:
    """A generation of which one rank alone is there."""
    if todist.get_rank() != only:
        return ""
    with pytest.raises(TimeoutError) as caught:
        rendezvous("gathered", timeout=0.5)
    return str(caught.value)


def test_stale_sessions_of_generations_that_never_met():
    store = open_store()
    for only, gathered in ((1, "rank zero"), (0, "[1, 2]"), (2, "rank zero"), (0, "[1, 2]")):
        assert gathered in run_world(join_alone, 3, only, store=store)[only]
    gathered = run_world(rendezvous_and_gather, 3, "gathered", store=store)
    assert gathered[0] == gathered[1] == gathered[2]
    assert [part.split(":")[0] for part in gathered[0]] == ["0", "1", "2"]
    assert len({part.split(":")[1] for part in gathered[0]}) == 3
    again = run_world(rendezvous_and_gather, 3, "gathered", store=store)
    assert again[0] == again[1] == again[2] and set(again[0]).isdisjoint(gathered[0])


def test_a_confirmed_session_of_the_dead_is_not_joined():
    store = dist.HashStore()
    sessions: dict[str, str] = {}

    def join_session(name: str) -> None:
        sessions[name] = join_rendezvous(store, 1, 10)

    for name in ("first", "second", "third"):
        # The attendant comes first and finds the earlier session, complete and confirmed.
        attendant = threading.Thread(target=join_session, args=(name,))
        attendant.start()
        time.sleep(0.05)
        assert attendant.is_alive()
        assert host_rendezvous(store, 2, 10) == (attendant.join() or sessions[name])
    assert len(set(sessions.values())) == 3


def wait_for_the_missing(way: str) -> tuple[str, float] | None:
    if todist.get_rank() == 2:
        return None
    start = time.monotonic()
    join = partial(rendezvous, "missing", timeout=1.0)
    if way != "rendezvous":
        join = partial(todist.init_rpc, rendezvous_timeout=1.0)
    with pytest.raises(TimeoutError) as caught:
        join()
    assert not todist.rpc_is_initialized()
    return str(caught.value), time.monotonic() - start


@pytest.mark.parametrize("way", ["rendezvous", "init_rpc"])
def test_a_missing_rank_is_named_within_the_timeout(way):
    zero, one, _ = run_world(wait_for_the_missing, 3, way)
    assert "[2]" in zero[0] and "rank zero" in one[0]
    assert 0.9 < zero[1] < 50 and one[1] < 50


def test_ranks_that_came_learn_that_the_rendezvous_is_closed():
    store, raised = dist.HashStore(), []

    def join() -> None:
        with pytest.raises(RendezvousClosedError, match=r"ranks \[2\] .* did not arrive") as caught:
            join_rendezvous(store, 1, 20)
        raised.append(caught.type)

    attendant = threading.Thread(target=join)
    attendant.start()
    with pytest.raises(TimeoutError, match=r"ranks \[2\]"):
        host_rendezvous(store, 3, 0.3)
    attendant.join(20)
    assert raised == [RendezvousClosedError]


def test_a_rank_that_joins_twice_does_not_count_for_another():
    store = dist.HashStore()
    with ThreadPoolExecutor() as pool:
        host = pool.submit(host_rendezvous, store, 3, 20)
        session = store.get("session").decode()
        for nonce in ("of the dead", "of its restart"):
            store.set(f"{session}/joined/1", nonce)
            store.add(f"{session}/arrived", 1)
        time.sleep(0.3)
        assert join_rendezvous(store, 2, 20) == host.result() == session


def join_without_success(store: dist.Store, timeout: float) -> RendezvousTimeoutError:
    with pytest.raises(RendezvousTimeoutError) as caught:
        join_rendezvous(store, 1, timeout)
    return caught.value


def test_a_rank_zero_that_starts_late_reports_who_is_missing():
    store = dist.HashStore()
    with ThreadPoolExecutor() as pool:
        # Without rank zero, rank 1 would leave after 3 s.
        rank_1 = pool.submit(join_without_success, store, 2.0)
        time.sleep(1.3)
        with pytest.raises(RendezvousTimeoutError, match=r"ranks \[2\]"):
            host_rendezvous(store, 3, 2.0)
        assert isinstance(rank_1.result(), RendezvousClosedError)


def test_a_rank_zero_that_does_not_confirm_its_session_is_named():
    store = dist.HashStore()
    store.set("session", "of the dead")
    error = join_without_success(store, 0.1)
    assert error.rank == 0 and re.search(r"opened .* but did not confirm it within 1", str(error))
    store.set("of the dead/outcome", json.dumps({"message": "", "nonces": {}}))
    error = join_without_success(store, 0.1)
    assert error.rank == 0 and "waited 0.1 s for rank zero to open" in str(error)


def test_restarts_of_rank_zero_do_not_extend_the_wait_forever():
    store, ended = dist.HashStore(), threading.Event()

    def restart_again_and_again() -> None:
        number = 0
        while not ended.wait(0.1):
            store.set("session", f"session {(number := number + 1)}")

    with ThreadPoolExecutor() as pool:
        pool.submit(restart_again_and_again)
        try:
            assert pool.submit(join_without_success, store, 0.1).result(timeout=30).rank == 0
        finally:
            ended.set()


def test_the_report_of_a_rank_that_died_before_it_published_all_counts(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    store = dist.HashStore()
    store.set("part/1", '"of the dead"')
    assert all_gather_object(store, "part", "here", timeout=0.05) == ["here", "of the dead"]


def gather_without_one() -> str | None:
    store = rendezvous("gathered", timeout=60)
    if todist.get_rank() == 1:
        return None
    with pytest.raises(TimeoutError) as caught:
        all_gather_object(store, "part", "here", timeout=0.5)
    return str(caught.value)


def test_a_rank_that_does_not_report_is_named():
    gathered = run_world(gather_without_one, 3)
    assert "[1]" in gathered[0] and "[1]" in gathered[2]


def report_and_leave() -> list | None:
    store = rendezvous("reported", timeout=60)
    if todist.get_rank() == 1:
        time.sleep(0.3)
        report_object(store, "part", "of the rank that leaves")
        return None
    return all_gather_object(store, "part", todist.get_rank(), timeout=60)


def test_a_rank_may_report_without_waiting_for_the_others():
    gathered = [0, "of the rank that leaves", 2]
    assert run_world(report_and_leave, 3) == [gathered, None, gathered]


def repeat(times: int) -> list[int]:
    return [generation(number, crash=False) for number in range(times)]


@pytest.mark.parametrize("size", [1, 3])
def test_init_and_shutdown_again_and_again_in_one_process(size):
    assert run_world(repeat, size, 5) == [[0, 1, 4, 9, 16]] * size


@todist.auto_init_rpc()
def fail_on(rank: int) -> None:
    todist.barrier()
    if todist.get_rank() == rank:
        raise ArithmeticError("this rank fails")


def fail_and_go_on() -> list:
    outcomes: list = []
    for failing in (1, 0):
        try:
            fail_on(failing)
        except Exception as error:
            outcomes.append(type(error).__name__)
        assert not todist.rpc_is_initialized()
        outcomes.append(generation(3 + failing, crash=False))
    return outcomes


def test_init_again_after_one_rank_failed_in_between():
    outcomes = run_world(fail_and_go_on, 3)
    for rank, outcome in enumerate(outcomes):
        assert outcome == [
            "ArithmeticError" if rank == 1 else "WorkerLostError",
            16,
            "ArithmeticError" if rank == 0 else "WorkerLostError",
            9,
        ]
