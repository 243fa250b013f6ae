"""Decorators that choose ranks when the function is called, not when it is decorated."""

import pickle

import pytest
from worlds import run_world

import metadist as todist


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
def test_ranks_of_a_real_world(size):
    assert run_world(ask_all, size) == EXPECTED[:size]


def test_the_rank_is_read_at_each_call(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    for rank in (2, 0, 1):
        monkeypatch.setenv("RANK", str(rank))
        assert ask_all() == EXPECTED[rank]


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
