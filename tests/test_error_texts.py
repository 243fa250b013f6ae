"""Texts of errors."""

import pytest

from metadist.errors import one_line, user_frame


def test_an_error_is_one_short_line():
    assert one_line(OSError("a\n b")) == "a b"
    assert one_line(KeyError()) == "KeyError"
    assert len(one_line(OSError("long " * 100))) == 300


def fail() -> None:
    len(None)  # type: ignore[arg-type]


def test_the_frame_of_an_error_is_that_of_the_users_code():
    with pytest.raises(TypeError) as caught:
        fail()
    assert user_frame(caught.value).endswith("test_error_texts.py:15, in fail")
    assert user_frame(TypeError("was not raised")) == ""
