"""Waiting with a deadline: for a condition, for a call that may never return, for the exit."""

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

T = TypeVar("T")


def wait_until(
    condition: Callable[[], object],
    seconds: float | None,
    pause: float = 0.05,
    longest_pause: float | None = None,
) -> bool:
    """Poll a condition until it is true, for at most `seconds`.

    It polls because a wait inside a library would block signal handlers.

    Args:
        condition: the function to call until its result is true.
        seconds: the time limit; None to wait forever.
        pause: seconds between two calls.
        longest_pause: the limit up to which each pause is a tenth longer than the previous one.
            Default: all pauses are equal.

    Returns:
        Whether the condition became true in time.
    """
    deadline = None if seconds is None else time.monotonic() + seconds
    while not condition():
        if deadline is not None and time.monotonic() > deadline:
            return False
        time.sleep(pause)
        if longest_pause is not None:
            pause = min(pause * 1.1, longest_pause)
    return True


def call_within(seconds: float, function: Callable[[], T]) -> "Future[T]":
    """Call a function in a daemon thread, and wait at most `seconds` for it.

    Args:
        seconds: the longest wait.
        function: the function to call; it continues in its thread if it takes longer.

    Returns:
        A future of the function's result or exception. It is done if the function has ended.
    """
    future: Future[T] = Future()

    def call() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=call, name="metadist-call", daemon=True).start()
    wait([future], seconds)
    return future


def exit_after(seconds: float, status: int) -> None:
    """End the process with an exit status after `seconds`, whatever it is doing then."""
    timer = threading.Timer(seconds, os._exit, [status])
    timer.daemon = True
    timer.start()
