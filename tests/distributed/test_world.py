"""Ranks are read from the environment at each call."""

import os
import pickle

import pytest
from worlds import run_world

import metadist as todist
from metadist.distributed.world import is_single_node, restart_count, usable_cpus

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)

    def be(**variables: object) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))

    return be


def test_a_process_without_torchrun_is_a_world_of_its_own():
    assert todist.get_world_info() == (0, 1, 0, 1)
    assert todist.get_worker_id() == 0 and todist.get_worker_id("worker0") == 0
    assert is_single_node() and restart_count() == 0


def test_the_environment_is_read_at_each_question(environment):
    for rank, size in ((0, 2), (1, 2), (5, 6)):
        environment(
            RANK=rank,
            WORLD_SIZE=size,
            LOCAL_RANK=rank % 2,
            LOCAL_WORLD_SIZE=2,
            TORCHELASTIC_RESTART_COUNT=rank,
        )
        info = todist.get_world_info()
        assert info == (rank, size, rank % 2, 2) and type(info) is todist.WorldInfo
        assert info.rank == info.world_rank == rank
        assert todist.get_rank() == todist.get_world_rank() == todist.get_worker_id() == rank
        assert todist.get_world_size() == size
        assert todist.get_local_rank() == rank % 2 and todist.get_local_world_size() == 2
        assert is_single_node() == (size == 2) and restart_count() == rank


def test_without_local_numbers_the_world_is_one_node(environment):
    environment(RANK=2, WORLD_SIZE=3)
    assert todist.get_world_info() == (2, 3, 2, 3)
    for address in ("localhost", "127.0.0.1", "::1", "node0"):
        environment(MASTER_ADDR=address)
        assert is_single_node() == (address != "node0")


def test_only_the_cpus_of_this_process_are_usable(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5, 6}, raising=False)
    assert usable_cpus() == 3


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": 0},
        {"WORLD_SIZE": 2},
        {"RANK": "zero", "WORLD_SIZE": 2},
        {"RANK": 1, "WORLD_SIZE": ""},
        {"RANK": 2, "WORLD_SIZE": 2},
        {"RANK": -1, "WORLD_SIZE": 2},
        {"RANK": 0, "WORLD_SIZE": 0},
        {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 3, "LOCAL_WORLD_SIZE": 2},
        {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": "a"},
    ],
)
def test_nonsense_is_refused_in_one_line(environment, variables):
    environment(**variables)
    with pytest.raises(todist.UserError) as caught:
        todist.get_world_info()
    assert "RANK" in str(caught.value) and "\n" not in str(caught.value)


def test_unknown_workers_are_refused_in_one_line(environment):
    environment(RANK=0, WORLD_SIZE=2)
    assert [todist.get_worker_id(i) for i in (0, 1, "worker0", "worker1")] == [0, 1, 0, 1]
    for worker in (2, -1, "worker2", "nobody"):
        with pytest.raises(todist.UserError, match="there is no worker") as caught:
            todist.get_worker_id(worker)
        assert "\n" not in str(caught.value)


def ask_everything() -> tuple:
    one_by_one = (
        todist.get_world_rank(),
        todist.get_world_size(),
        todist.get_local_rank(),
        todist.get_local_world_size(),
    )
    assert todist.get_rank() == todist.get_worker_id() == one_by_one[0]
    return todist.get_world_info(), one_by_one


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_and_world_sizes_of_every_process(size):
    ranks = [(r, size, r, size) for r in range(size)]
    assert run_world(ask_everything, size) == [(ids, ids) for ids in ranks]


# --- decorators that choose ranks ---------------------------------------------------------------


@todist.rank_zero_only
def on_zero(a: int, *, b: int = 0) -> tuple:
    """Zero's."""
    return todist.get_rank(), a, b


@todist.rank_non_zero_only
def not_on_zero() -> int:
    return todist.get_rank()


@todist.on_rank(0, 2)
def on_zero_and_two() -> int:
    return todist.get_rank()


@todist.not_on_rank(0, 2)
def not_on_zero_and_two() -> int:
    return todist.get_rank()


@todist.on_rank()
def nowhere() -> int:
    return todist.get_rank()


@todist.not_on_rank()
def everywhere() -> int:
    return todist.get_rank()


def ask_all() -> list:
    return [
        on_zero(1, b=2),
        not_on_zero(),
        on_zero_and_two(),
        not_on_zero_and_two(),
        nowhere(),
        everywhere(),
    ]


EXPECTED = [
    [(0, 1, 2), None, 0, None, None, 0],
    [None, 1, None, 1, None, 1],
    [None, 2, 2, None, None, 2],
]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_of_started_processes(size):
    assert run_world(ask_all, size) == EXPECTED[:size]


def test_the_rank_is_read_at_each_call(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    for rank in (2, 0, 1):
        monkeypatch.setenv("RANK", str(rank))
        assert ask_all() == EXPECTED[rank]


@pytest.mark.parametrize("decorator", [todist.on_rank, todist.not_on_rank])
def test_ranks_that_are_no_integers_are_refused(decorator):
    for ranks in ([0, 1], on_zero):
        with pytest.raises(TypeError, match=r"ranks must be integers, as in @on_rank\(0, 1\)"):
            decorator(ranks)


def test_what_the_function_raises_comes_through(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    failing = todist.rank_zero_only(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        failing()
    monkeypatch.setenv("RANK", "1")
    assert failing() is None


def test_the_function_keeps_its_name_and_pickles():
    assert on_zero.__name__ == "on_zero" and on_zero.__doc__ == "Zero's."
    assert pickle.loads(pickle.dumps(on_zero)) is on_zero
