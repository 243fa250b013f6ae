"""Decorators that run a function on chosen ranks only. The rank is read at each call."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from metadist.distributed.world import get_world_rank

P = ParamSpec("P")
T = TypeVar("T")


def _when(chosen: Callable[[int], bool]) -> Callable[[Callable[P, T]], Callable[P, T | None]]:
    def decorate(function: Callable[P, T]) -> Callable[P, T | None]:
        @functools.wraps(function)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> T | None:
            return function(*args, **kwargs) if chosen(get_world_rank()) else None

        return guarded

    return decorate


def on_rank(*ranks: int) -> Callable[[Callable[P, T]], Callable[P, T | None]]:
    """Decorator: the function runs on `ranks` and returns None on all others."""
    return _when(lambda rank: rank in ranks)


def not_on_rank(*ranks: int) -> Callable[[Callable[P, T]], Callable[P, T | None]]:
    """Decorator: the function runs everywhere but on `ranks`, where it returns None."""
    return _when(lambda rank: rank not in ranks)


def rank_zero_only(function: Callable[P, T]) -> Callable[P, T | None]:
    """Decorator: the function runs on rank zero and returns None elsewhere."""
    return on_rank(0)(function)


def rank_non_zero_only(function: Callable[P, T]) -> Callable[P, T | None]:
    """Decorator: the function runs everywhere but on rank zero, where it returns None."""
    return not_on_rank(0)(function)
