"""The error that metadist raises for mistakes of the user, exit statuses, hints at spellings."""

import difflib
from collections.abc import Iterable

FAILURE_STATUS = 1
"""Exit status after an error that is no `UserError`."""

USER_ERROR_STATUS = 2
"""Exit status after a `UserError`."""

SIGNAL_STATUSES = (130, 143)
"""Exit statuses after SIGINT and SIGTERM: the job has saved a checkpoint and can be resumed."""


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


def state_dict_reason(error: BaseException) -> str:
    """What does not fit, from an error of `load_state_dict`, whose first line is a heading."""
    lines = str(error).strip().splitlines()
    return lines[1].strip() if len(lines) > 1 else first_line(error)
