"""The error that metadist raises for mistakes of the user, exit statuses, hints at spellings."""

import difflib
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path

FAILURE_STATUS = 1
"""Exit status after an error that is no `UserError`."""

USER_ERROR_STATUS = 2
"""Exit status after a `UserError`."""

SIGNAL_STATUSES = (130, 143)
"""Exit statuses after SIGINT and SIGTERM: the job has saved a checkpoint and can be resumed."""


_LIBRARIES = sys.stdlib_module_names | {"metadist", "numpy", "optree", "torch"}
_MAX_LINE = 300


class UserError(ValueError):
    """A user-fixable error: a wrong option, a missing file, a full disk.

    The message is one sentence that says what was wrong, what was expected and what to do. Entry
    points print it on rank zero, without a traceback, and exit with status 2; any other exception
    is printed with its traceback.
    """


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """A hint at the name that is nearest to a misspelt word, ignoring case.

    Returns:
        " (did you mean NAME?)", or "" if no name is near.
    """
    lower = {name.lower(): name for name in names}
    near = difflib.get_close_matches(word.lower(), lower, n=1)
    return f" (did you mean {lower[near[0]]}?)" if near else ""


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its class."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def one_line(error: BaseException) -> str:
    """An error's text as one line of at most 300 characters, or its class."""
    return " ".join(str(error).split())[:_MAX_LINE] or type(error).__name__


def user_frame(error: BaseException) -> str:
    """The innermost frame of an error that is outside metadist, torch and Python's library.

    Returns:
        Such as "my_module.py:9, in forward"; "" without such a frame.
    """
    frames = traceback.walk_tb(error.__traceback__)
    own = [
        (frame.f_code, line)
        for frame, line in frames
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in _LIBRARIES
    ]
    if not own:
        return ""
    code, line = own[-1]
    path = Path(code.co_filename)
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return f"{path}:{line}, in {code.co_name}"


def state_dict_reason(error: BaseException) -> str:
    """What does not fit, from an error of `load_state_dict`, whose first line is a heading."""
    lines = str(error).strip().splitlines()
    return lines[1].strip() if len(lines) > 1 else first_line(error)
