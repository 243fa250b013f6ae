"""What the names in a pickle of arrays stand for; nothing else that a pickle names is accepted.

NumPy writes an array as a call that makes an empty one, followed by its contents: shape, type and
raw bytes; a type likewise.
"""

import re
from collections.abc import Callable
from typing import Any

import numpy as np

_PLAIN_TYPE = re.compile(r"[biuf]\d{1,2}|[SU]\d{1,6}")


class Refused(Exception):
    """Something that plain data has no need of; its text goes on from the file's name."""


class Name(str):
    """A class or function that a pickle names."""


class Unbuilt:
    """An array or type whose contents come with a later instruction.

    Attributes:
        build: makes it of the contents.
        places: where the reader's memo holds it.
    """

    def __init__(self, build: Callable[[Any], Any]) -> None:
        self.build = build
        self.places: list[int] = []


def _type(text: Any, *_: Any) -> Unbuilt:
    text = text if isinstance(text, str) else str(text, "ascii")
    if not _PLAIN_TYPE.fullmatch(text):
        raise Refused(f"has an array of type {text[:50]}")

    def build(state: Any) -> np.dtype:
        order = state[1] if isinstance(state[1], str) else str(state[1], "ascii")
        return np.dtype(text).newbyteorder(order)

    return Unbuilt(build)


def _array(buffer: Any, dtype: Any, shape: Any, order: str) -> np.ndarray:
    """A read-only array on the buffer itself; of text (Python 2), on its bytes."""
    if not isinstance(dtype, np.dtype):
        raise Refused("has an array without a type")
    if min(shape, default=0) < 0:  # which NumPy takes with an empty buffer
        raise ValueError(f"an array of shape {shape}")
    raw = buffer.encode("latin-1") if isinstance(buffer, str) else buffer
    array = np.ndarray(shape, dtype, memoryview(raw), order=order)
    if array.nbytes != len(raw):
        raise ValueError(f"{len(raw)} bytes for an array of {array.nbytes}")
    array.setflags(write=False)
    return array


def _empty_array(*_: Any) -> Unbuilt:
    def build(state: Any) -> np.ndarray:
        _, shape, dtype, by_column, raw = state
        return _array(raw, dtype, shape, "F" if by_column else "C")

    return Unbuilt(build)


def _scalar(dtype: Any, raw: Any) -> Any:
    return _array(raw, dtype, (), "C").item()


def _encoded(text: str, encoding: str) -> bytes:
    if encoding not in ("latin1", "latin-1"):
        raise Refused(f"encodes text as {encoding}")
    return text.encode(encoding)


def _no_bytes() -> bytes:
    return b""


def _dictionary(first: Any = (), *_: Any) -> dict[Any, Any]:
    # A defaultdict's argument is the type of its values; an OrderedDict's, in Python 2, its items.
    return {} if isinstance(first, Name) else dict(first)


def _only_named(*_: Any) -> None:
    raise Refused("calls a type that is only to be named")


KNOWN: dict[str, Callable[..., Any]] = {
    "numpy.ndarray": _only_named,
    "numpy.dtype": _type,
    "_codecs.encode": _encoded,
    "collections.OrderedDict": _dictionary,
    "collections.defaultdict": _dictionary,
}
"""By module and name, as Python 2 and 3 and NumPy 1 and 2 write them."""

for _builtins in ("__builtin__", "builtins"):
    KNOWN[f"{_builtins}.bytes"] = _no_bytes
    KNOWN[f"{_builtins}.list"] = _only_named
for _core in ("numpy.core", "numpy._core"):
    KNOWN[f"{_core}.multiarray._reconstruct"] = _empty_array
    KNOWN[f"{_core}.multiarray.scalar"] = _scalar
    KNOWN[f"{_core}.numeric._frombuffer"] = _array
