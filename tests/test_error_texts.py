"""Texts of errors."""

import ast
import re
from pathlib import Path

import optree
import pytest
from torch import nn

import metadist
from metadist.errors import FULL_TRACEBACKS, one_line, state_dict_reason, user_frame, user_traceback


def test_an_error_is_one_short_line():
    assert one_line(OSError("a\n b")) == "a b"
    assert one_line(KeyError()) == "KeyError"
    assert len(one_line(OSError("long " * 100))) == 300


def fail() -> None:
    len(None)  # type: ignore[arg-type]


def test_the_frame_of_an_error_is_that_of_the_users_code():
    with pytest.raises(TypeError) as caught:
        fail()
    line = fail.__code__.co_firstlineno + 1
    assert user_frame(caught.value).endswith(f"test_error_texts.py:{line}, in fail")
    assert user_frame(TypeError("was not raised")) == ""


class FailsInOptree:
    """Called by optree, it raises an error inside of optree."""

    def __call__(self, leaf: object) -> None:
        optree.tree_map(len, [leaf], leaf)


@pytest.mark.parametrize("full", ["0", "1"])
def test_a_traceback_starts_in_the_users_code(monkeypatch, full):
    monkeypatch.setenv(FULL_TRACEBACKS, full)
    with pytest.raises(ValueError, match="Expected") as caught:
        optree.tree_map(FailsInOptree(), [1])
    error = caught.value
    error.__traceback__ = error.__traceback__.tb_next  # without the frame of this test
    text = user_traceback(error)
    assert text.startswith("Traceback (most recent call last):\n")
    assert text.count("in tree_map") == (2 if full == "1" else 1)
    assert text.index("in __call__") < text.rindex("in tree_map")  # frames below are shown


def test_an_error_in_a_library_has_all_frames():
    with pytest.raises(TypeError) as caught:
        optree.tree_map(len, [1])
    error = caught.value
    error.__traceback__ = error.__traceback__.tb_next
    assert "in tree_map" in user_traceback(error)
    assert user_traceback(TypeError("was not raised")) == "TypeError: was not raised\n"


def last_character(text: ast.expr) -> str:
    """The last character of a text; "." for texts that end with a value."""
    if isinstance(text, ast.JoinedStr):
        text = text.values[-1]
    return str(text.value)[-1] if isinstance(text, ast.Constant) else "."


def test_messages_of_user_errors_are_sentences():
    for path in Path(metadist.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "UserError":
                assert last_character(node.args[0]) == ".", f"{path}:{node.lineno}"


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (1, r'Missing key\(s\) in state_dict: "0.weight", "0.bias"'),
        (3, r'Missing key\(s\) in state_dict: "0.weight", "0.bias", "1.weight" and 3 more'),
    ],
)
def test_a_mismatch_of_states_names_some_tensors(layers, expected):
    with pytest.raises(RuntimeError) as caught:
        nn.Sequential(*(nn.Linear(1, 1) for _ in range(layers))).load_state_dict({})
    assert re.fullmatch(rf"{expected}\.? ?", state_dict_reason(caught.value))
