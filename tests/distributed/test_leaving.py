"""Leaving after an error is bounded, and known to have ended."""

import threading
import time

from metadist.distributed import leaving


def test_what_does_not_return_is_left_behind(monkeypatch):
    monkeypatch.setattr(leaving, "LEAVE_SECONDS", 0.1)
    released = threading.Event()
    leaving.leave(released.wait)
    assert not leaving.has_left()
    released.set()
    deadline = time.monotonic() + 10
    while not leaving.has_left() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert leaving.has_left()


def test_an_error_in_leaving_does_not_replace_the_error_before_it(capsys):
    def fail() -> None:
        raise LookupError("also broken")

    leaving.leave(fail)
    assert capsys.readouterr().err == "" and leaving.has_left()
