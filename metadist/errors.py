"""The error for mistakes of the user, exit statuses, and helpers for error messages."""

import difflib
import os
import sys
import traceback
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

FAILURE_STATUS = 1
"""Exit status after an error that is not a `UserError`."""

USER_ERROR_STATUS = 2
"""Exit status after a `UserError`."""

SIGNAL_STATUSES = (130, 143)
"""Exit statuses after SIGINT and SIGTERM: the job has saved a checkpoint and can be resumed."""


FULL_TRACEBACKS = "METADIST_TRACEBACK"
"""The environment variable that is "1" if HYDRA_FULL_ERROR=1 was set for the command."""

_LIBRARIES = {"hydra", "metadist", "numpy", "omegaconf", "optree", "PIL", "pydantic", "timm"}
_LIBRARIES |= {"torch", "torchvision", *sys.stdlib_module_names}
_MAX_LINE = 300


class UserError(ValueError):
    """A user-fixable error: a wrong option, a missing file, a full disk.

    The message is one sentence that says what was wrong, what was expected and what to do. Entry
    points print it on rank zero, without a traceback, and exit with status 2; any other exception
    is printed with its traceback.
    """


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """A hint that gives the name closest to a misspelled word, ignoring case.

    Returns:
        " (did you mean NAME?)", or "" if no name is close.
    """
    by_lowercase = {name.lower(): name for name in names}
    matches = difflib.get_close_matches(word.lower(), by_lowercase, n=1)
    return f" (did you mean {by_lowercase[matches[0]]}?)" if matches else ""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its class name if the message is empty.

    To a first line that ends with a colon, the last line is added, such as the error of a
    subprocess after its traceback. The advice that `torch.compile` and RPC append is left out.
    """
    text = str(error).partition("\nSet TORCHDYNAMO_VERBOSE=1")[0]
    text = text.partition(" Default RPC pickler does not serialize")[0]
    lines = text.strip().splitlines() or [type(error).__name__]
    return f"{lines[0]} {lines[-1].strip()}" if lines[0][-1] == ":" and lines[1:] else lines[0]


def printable(text: str, kept: str = "\n\t") -> str:
    """The text with "?" for control characters, which would be commands to a terminal.

    Args:
        text: a text that may contain names from another person's files.
        kept: the control characters to keep.
    """
    return "".join("?" if each not in kept and _is_control(each) else each for each in text)


def _is_control(character: str) -> bool:
    """Whether a character is a control character, changes the direction or ends a line."""
    directions = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
    return unicodedata.category(character) in ("Cc", "Zl", "Zp") or character in directions


def one_line(error: BaseException) -> str:
    """An error's message as one line of at most 300 characters, or its class name."""
    return " ".join(str(error).split())[:_MAX_LINE] or type(error).__name__


def user_frame(error: BaseException) -> str:
    """The innermost frame of an error's traceback that is in the user's code.

    Frames of metadist, of the libraries that it uses and of the standard library are skipped.

    Returns:
        The position, such as "my_module.py:9, in forward"; "" if there is no such frame.
    """
    frames = traceback.walk_tb(error.__traceback__)
    user_frames = [(frame.f_code, line) for frame, line in frames if _is_of_user(frame)]
    if not user_frames:
        return ""
    code, line = user_frames[-1]
    path = Path(code.co_filename)
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return f"{path}:{line}, in {code.co_name}"


def user_traceback(error: BaseException) -> str:
    """An error's traceback, as Python prints it, from the outermost frame in the user's code on.

    All frames are in it if there is no such frame, or with HYDRA_FULL_ERROR=1.
    """
    first = error.__traceback__
    if os.environ.get(FULL_TRACEBACKS, os.environ.get("HYDRA_FULL_ERROR")) != "1":
        while first is not None and not _is_of_user(first.tb_frame):
            first = first.tb_next
    frames = first or error.__traceback__
    return "".join(traceback.format_exception(type(error), error, frames))


def _is_of_user(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] not in _LIBRARIES


def state_dict_reason(error: BaseException) -> str:
    """The first mismatch in an error of `load_state_dict`, with at most three names."""
    lines = str(error).strip().splitlines()
    reason = lines[1].strip() if len(lines) > 1 else first_line(error)
    first, *others = reason.rstrip(". ").split(", ")
    if len(others) > 2 and "key(s) in state_dict" in first:
        return f"{', '.join([first, *others[:2]])} and {len(others) - 2} more"
    return reason
