"""Pickles of arrays and plain containers, read without running anything that they hold.

Datasets are handed round as pickles, and Python's own reader does whatever a pickle says, down to
running commands. The reader here knows numbers, text, lists, tuples, dictionaries and NumPy
arrays, all of them built by its own code: a name in the file is only compared with a short list
and never looked up. Long strings are not copied, so that an array of a mapped file stays there.
"""

import mmap
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from metadist.errors import UserError
from metadist.tasks.data_files import kind_and_line
from metadist.tasks.pickled_arrays import KNOWN, Name, Refused, Unbuilt

_LONG = 1 << 16
"""Strings of more bytes than this stay where they are, as views of the data."""

_NAME = 256
"""Bytes of the longest name of a module, class or function."""

_KEYS = str | bytes | int | float | None
"""What a dictionary may have as keys."""

_STEPS = 20_000_000
"""More instructions than these are no dataset; each may take a hundred bytes of memory."""


def read_file(path: Path) -> Any:
    """The object in a pickle, its arrays being views of the mapped file. See `read`.

    Raises:
        UserError: as of `read`, or the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # mmap takes no empty file
        raise UserError(f"{path} cannot be read ({error}); put a complete copy there") from error
    return read(data, str(path))


def read(data: Any, where: str) -> Any:
    """The object in a pickle of protocol 2 to 5, as Python 2 or 3 wrote it.

    Args:
        data: the whole pickle, in anything with a buffer.
        where: what messages call it.

    Returns:
        None, bool, int, float, str, bytes, list, tuple, dict or np.ndarray (read-only) of those.
        Short strings of Python 2 are str, by Latin-1; long bytes are memoryview.

    Raises:
        UserError: there is anything else in it, or it is damaged. Nothing of it was run.
    """
    try:
        return _Reader(memoryview(data)).run()
    except Refused as error:
        raise UserError(
            f"{where} {error}, where only arrays, numbers, text, lists and dictionaries are "
            "accepted; nothing of it was run: take the file from a source that you trust"
        ) from None
    except (
        AttributeError, IndexError, KeyError, OverflowError, RecursionError, struct.error,
        TypeError, ValueError,
    ) as error:  # fmt: skip
        raise UserError(
            f"{where} is no complete pickle ({kind_and_line(error)}); replace it by a complete copy"
        ) from None


def release(array: np.ndarray) -> None:
    """Give back the memory in which pages of an array's mapped file lie, until they are read."""
    owner: Any = array
    while isinstance(owner, np.ndarray | memoryview):
        owner = owner.base if isinstance(owner, np.ndarray) else owner.obj
    if isinstance(owner, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):  # not on every system
        owner.madvise(mmap.MADV_DONTNEED)


class _Reader:
    """The pickle machine: a stack, marks on it, and a memo. See `pickletools.dis`."""

    def __init__(self, data: memoryview) -> None:
        self.data = data.cast("B") if data.format != "B" else data
        self.position = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        for _ in range(_STEPS):
            code = self.take(1)[0]
            if code == _STOP:
                return self.stack.pop()
            instruction = _INSTRUCTIONS.get(code)
            if instruction is None:
                raise Refused(f"has the instruction {bytes([code])!r}, of objects or of protocol 0")
            instruction(self)
        raise Refused(f"has more than {_STEPS:,} pickle instructions")

    # --- reading -------------------------------------------------------------------------------

    def take(self, count: int) -> memoryview:
        end = self.position + count
        if count < 0 or end > len(self.data):
            raise ValueError("it ends too early")
        found = self.data[self.position : end]
        self.position = end
        return found

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def line(self) -> str:
        start = self.position
        length = bytes(self.data[start : start + _NAME]).index(b"\n")
        return str(self.take(length + 1)[:-1], "ascii")

    def string(self, form: str) -> bytes | memoryview:
        found = self.take(self.number(form))
        return found if len(found) > _LONG else bytes(found)

    # --- the stack -----------------------------------------------------------------------------

    def since_mark(self) -> list[Any]:
        start = self.marks.pop()
        found = self.stack[start:]
        del self.stack[start:]
        return found

    def pop(self, count: int) -> list[Any]:
        if count > len(self.stack):
            raise IndexError("its stack is empty")
        found = self.stack[-count:]
        del self.stack[-count:]
        return found

    def container(self, kind: type) -> Any:
        if not isinstance(self.stack[-1], kind):
            raise Refused(f"fills a {type(self.stack[-1]).__name__} as a {kind.__name__}")
        return self.stack[-1]

    def append(self, items: list[Any]) -> None:
        self.container(list).extend(items)

    def update(self, items: list[Any]) -> None:
        for key in items[::2]:
            if not isinstance(key, _KEYS):  # the hash of a tuple in a tuple in … has no bottom
                raise Refused(f"has a {type(key).__name__} as a key")
        self.container(dict).update(zip(items[::2], items[1::2], strict=True))

    def remember(self, place: int) -> None:
        self.memo[place] = self.stack[-1]
        if isinstance(self.stack[-1], Unbuilt):
            self.stack[-1].places.append(place)

    # --- what stands for code ------------------------------------------------------------------

    def name(self, module: Any, name: Any) -> None:
        if not (isinstance(module, str) and isinstance(name, str)):
            raise Refused("has a name that is no text")
        found = Name(f"{module}.{name}")
        if found not in KNOWN:
            raise Refused(f"names {' '.join(found[:_NAME].split())}")
        self.stack.append(found)

    def reduce(self) -> None:
        function, arguments = self.pop(2)
        known = KNOWN.get(function) if isinstance(function, Name) else None
        if known is None or not isinstance(arguments, tuple):
            raise Refused(f"calls a {type(function).__name__}")
        self.stack.append(known(*arguments))

    def build(self) -> None:
        unbuilt, state = self.pop(2)
        if not isinstance(unbuilt, Unbuilt):
            raise Refused(f"gives a {type(unbuilt).__name__} attributes")
        made = unbuilt.build(state)
        self.stack.append(made)
        for place in unbuilt.places:
            self.memo[place] = made


_STOP = ord(".")


def _push(value: Callable[[_Reader], Any]) -> Callable[[_Reader], None]:
    return lambda reader: reader.stack.append(value(reader))


_INSTRUCTIONS: dict[int, Callable[[_Reader], Any]] = {
    ord(code): instruction
    for code, instruction in {
        "\x80": lambda r: r.take(1),  # the protocol
        "\x95": lambda r: r.take(8),  # the length of a frame
        "(": lambda r: r.marks.append(len(r.stack)),
        "N": _push(lambda r: None),
        "\x88": _push(lambda r: True),
        "\x89": _push(lambda r: False),
        "K": _push(lambda r: r.number("<B")),
        "M": _push(lambda r: r.number("<H")),
        "J": _push(lambda r: r.number("<i")),
        "\x8a": _push(lambda r: int.from_bytes(r.string("<B"), "little", signed=True)),
        "G": _push(lambda r: r.number(">d")),
        "U": _push(lambda r: str(r.string("<B"), "latin-1")),
        "T": _push(lambda r: _text(r.string("<I"))),
        "C": _push(lambda r: r.string("<B")),
        "B": _push(lambda r: r.string("<I")),
        "\x8e": _push(lambda r: r.string("<Q")),
        "\x96": _push(lambda r: r.string("<Q")),
        "\x8c": _push(lambda r: str(r.string("<B"), "utf-8", "surrogatepass")),
        "X": _push(lambda r: str(r.string("<I"), "utf-8", "surrogatepass")),
        "\x8d": _push(lambda r: str(r.string("<Q"), "utf-8", "surrogatepass")),
        ")": _push(lambda r: ()),
        "\x85": _push(lambda r: tuple(r.pop(1))),
        "\x86": _push(lambda r: tuple(r.pop(2))),
        "\x87": _push(lambda r: tuple(r.pop(3))),
        "t": _push(lambda r: tuple(r.since_mark())),
        "]": _push(lambda r: []),
        "l": _push(lambda r: r.since_mark()),
        "a": lambda r: r.append(r.pop(1)),
        "e": lambda r: r.append(r.since_mark()),
        "}": _push(lambda r: {}),
        "s": lambda r: r.update(r.pop(2)),
        "u": lambda r: r.update(r.since_mark()),
        "q": lambda r: r.remember(r.number("<B")),
        "r": lambda r: r.remember(r.number("<I")),
        "\x94": lambda r: r.remember(len(r.memo)),
        "h": _push(lambda r: r.memo[r.number("<B")]),
        "j": _push(lambda r: r.memo[r.number("<I")]),
        "c": lambda r: r.name(r.line(), r.line()),
        "\x93": lambda r: r.name(*r.pop(2)),
        "R": _Reader.reduce,
        "b": _Reader.build,
    }.items()
}


def _text(found: bytes | memoryview) -> str | memoryview:
    """A string of Python 2, which may be text or the bytes of an array."""
    return found if isinstance(found, memoryview) else str(found, "latin-1")
