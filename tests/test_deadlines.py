import subprocess
import sys
import threading
import time

import pytest

from metadist.deadlines import call_within, wait_until


def test_a_condition_is_polled_until_it_is_true():
    answers = iter([False, 0, "yes"])
    assert wait_until(lambda: next(answers), 60.0, pause=0.001)
    assert not list(answers)


def test_a_condition_that_stays_false_is_given_up():
    started = time.monotonic()
    assert not wait_until(lambda: False, 0.05, pause=0.01)
    assert time.monotonic() - started >= 0.05


def test_a_condition_is_checked_once_even_without_time():
    assert wait_until(lambda: True, -1.0)


def test_pauses_grow_to_the_longest(monkeypatch):
    pauses = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    assert wait_until(lambda: len(pauses) == 4, None, pause=1.0, longest_pause=1.2)
    assert pauses == pytest.approx([1.0, 1.1, 1.2, 1.2])


def test_the_result_and_the_error_of_a_call():
    assert call_within(60.0, lambda: 7).result() == 7
    failed = call_within(60.0, lambda: 1 // 0)
    assert failed.done() and isinstance(failed.exception(), ZeroDivisionError)


def test_a_call_that_is_stuck_is_not_waited_for():
    release = threading.Event()
    call = call_within(0.01, release.wait)
    assert not call.done()
    release.set()
    assert call.result(timeout=60.0)


def test_the_process_ends_whatever_it_does():
    code = (
        "from metadist.deadlines import exit_after; import time; exit_after(0.1, 7); time.sleep(60)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=180).returncode == 7
