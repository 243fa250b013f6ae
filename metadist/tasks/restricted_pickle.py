"""Read a pickled dictionary of arrays and plain values without executing anything in it.

`pickle.Unpickler` with an allow-list in `find_class` is not enough: NumPy's own constructors follow
raw pointers from a crafted `dtype` state, a dictionary key of 30 nested tuples that share their
elements takes minutes to hash, and a key of 200,000 nested tuples overflows the C stack. This
subclass of the pure-Python unpickler therefore also has an allow-list of opcodes and of key types,
and builds arrays itself.
"""

import contextlib
import mmap
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from metadist.errors import UserError
from metadist.files import open_regular
from metadist.tasks.data_files import error_with_type

MAX_READS = 5_000_000
"""The most reads of one pickle; an opcode takes one to three, CIFAR-100 takes 0.5 million."""

MAX_LIST_READS = 100_000_000
"""The same for a list of arrays; the longest list of tieredImageNet has 448,695 arrays."""

_SMALL_VIEW_BYTES = 1 << 10
_VIEW_BYTES = 1 << 16
"""Longer strings are memory views of the file instead of copies."""

_MAX_NAME = 256
_MAX_INT_KEY = 1 << 31  # the hashes of larger integers can be made to collide
_NUMERIC_TYPE = re.compile(r"[biuf]\d{1,2}")


CONTENT_ERRORS = (AttributeError, KeyError, OverflowError, TypeError, ValueError)
"""Raised if the values of a loaded dictionary are not as the reader expects."""


class RefusedError(pickle.UnpicklingError):
    """The pickle has more than plain data. Its message continues a sentence that starts with the
    file's name.
    """


def load_file(path: Path) -> dict[str, Any]:
    """The dictionary in a pickle file; large arrays are views of the mapped file. See `load`.

    Raises:
        UserError: see `load`; or the file cannot be read.
    """
    return load(_map_file(path), str(path))


def _map_file(path: Path) -> mmap.mmap:
    try:
        with open_regular(path) as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: the file is empty
        raise UserError(
            f"{path} cannot be read ({error}); replace it with a complete copy."
        ) from error


def load(data: bytes | mmap.mmap, name: str) -> dict[str, Any]:
    """The dictionary in a pickle of protocol 2 to 5, written by Python 2 or 3.

    Args:
        data: the whole pickle.
        name: the file's name in error messages.

    Returns:
        The values by name. Arrays are read-only `np.ndarray` of numbers. Arrays inside lists,
        tuples and dictionaries are left unconverted; pass them to `to_integers`.

    Raises:
        UserError: the pickle is no dictionary, is damaged, is too long, or has anything but
            arrays, numbers, text, lists, tuples and dictionaries. Nothing in it was executed.
    """
    with _refused_errors(name):
        loaded = _Unpickler(_Source(data, _VIEW_BYTES, MAX_READS)).load()
        if not isinstance(loaded, dict):
            raise RefusedError(f"has a {type(loaded).__name__} instead of a dictionary")
        return {
            to_text(key): value.array if isinstance(value, _Array) else value
            for key, value in loaded.items()
        }


def load_arrays(path: Path) -> list[np.ndarray]:
    """The arrays in a pickle of a list of arrays; they are views of the mapped file.

    Raises:
        UserError: see `load`; or the file cannot be read.
    """
    data = _map_file(path)
    with _refused_errors(str(path)):
        loaded = _Unpickler(_Source(data, _SMALL_VIEW_BYTES, MAX_LIST_READS)).load()
        if not isinstance(loaded, list) or not all(isinstance(item, _Array) for item in loaded):
            raise RefusedError("has anything but a list of arrays")
        return [item.array for item in loaded]


@contextlib.contextmanager
def _refused_errors(name: str) -> Iterator[None]:
    """Report what is wrong with the pickle `name` as user errors."""
    try:
        yield
    except RefusedError as error:
        raise UserError(
            f"{name} {error}, where only arrays, numbers, text, lists and dictionaries are "
            "accepted; nothing in it was executed: use a file from a source that you trust."
        ) from None
    except (*CONTENT_ERRORS, EOFError, IndexError, MemoryError, pickle.UnpicklingError) as error:
        raise UserError(
            f"{name} is no complete pickle ({error_with_type(error)}); replace it with a complete "
            "copy."
        ) from None


def to_text(value: object) -> str:
    """A string, which Python 2 may have written as bytes.

    Raises:
        TypeError: `value` is neither str nor bytes.
    """
    if isinstance(value, bytes):
        return value.decode("utf-8")
    if isinstance(value, str):
        return value
    raise TypeError(f"expected text, got {type(value).__name__}")


def to_integers(values: object, max_length: int) -> np.ndarray:
    """A flat list, tuple or array of integers as int64 of shape (n,).

    Type and length are checked before anything is converted: `np.asarray` takes exponential time
    for nested lists that share their elements.

    Args:
        values: a value of a loaded dictionary, at any depth.
        max_length: the most integers that are accepted.

    Raises:
        TypeError: `values` is no list, tuple or array.
        ValueError: it has more than `max_length` elements, or elements that are no integers.
    """
    if isinstance(values, _Array):
        values = values.array
    if not isinstance(values, list | tuple | np.ndarray):
        raise TypeError(f"expected a list of integers, got {type(values).__name__}")
    if len(values) > max_length:
        raise ValueError(f"expected at most {max_length} integers, got {len(values)}")
    if isinstance(values, np.ndarray):
        integers = values.ndim == 1 and values.dtype.kind in "iu"
    else:
        integers = all(type(value) is int for value in values)
    if not integers:
        raise ValueError("expected a flat list of integers")
    return np.asarray(values, dtype=np.int64)


def to_images(values: object, shape: tuple[int, ...]) -> np.ndarray:
    """An array of images, uint8 of shape (n, *shape).

    Raises:
        TypeError: `values` is no array.
        ValueError: it has another type or shape.
    """
    if not isinstance(values, np.ndarray):
        raise TypeError(f"its images are a {type(values).__name__}")
    if values.dtype != np.uint8 or values.shape[1:] != shape:
        raise ValueError(f"its images are {values.dtype} of shape {values.shape}")
    return values


class _Source:
    """The pickle as the file that the unpickler reads; long reads return views, not copies."""

    def __init__(self, data: bytes | mmap.mmap, view_bytes: int, max_reads: int) -> None:
        self.view_bytes = view_bytes
        self.max_reads = max_reads
        self.data = memoryview(data)
        self.position = 0
        self.reads = 0

    def read(self, size: int, /) -> Any:
        """Bytes, or a memory view if they are long."""
        self.reads += 1
        if self.reads > self.max_reads:
            raise RefusedError(f"takes more than {self.max_reads:,} reads")
        content = self.data[self.position : self.position + size]
        if len(content) < size:
            raise EOFError("it is truncated")
        self.position += size
        return content if size > self.view_bytes else bytes(content)

    def readline(self) -> bytes:
        line = bytes(self.data[self.position : self.position + _MAX_NAME])
        return bytes(self.read(line.index(b"\n") + 1))


class _Global:
    """A class or function that the pickle names; it is never imported."""

    def __init__(self, name: str) -> None:
        self.name = name


class _DType:
    """A NumPy type; its byte order comes with its state."""

    def __init__(self, text: object, *_: object) -> None:
        self.text = to_text(text)
        self.order: Any = "="
        if not _NUMERIC_TYPE.fullmatch(self.text):
            raise RefusedError(f"has an array of type {self.text[:50]}")

    def set_state(self, state: tuple[Any, ...]) -> None:
        self.order = to_text(state[1])

    def dtype(self) -> np.dtype:
        return np.dtype(self.text).newbyteorder(self.order)


class _Array:
    """A NumPy array; it has no contents until its state is set."""

    array: np.ndarray

    def __init__(self, *_: object) -> None:
        pass

    def set_state(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, fortran_order, data = state
        self.array = _to_array(data, dtype, shape, "F" if fortran_order else "C")

    @classmethod
    def from_buffer(cls, data: Any, dtype: Any, shape: Any, order: Any) -> "_Array":
        result = cls()
        result.array = _to_array(data, dtype, shape, order)
        return result


def _to_array(data: Any, dtype: Any, shape: Any, order: Any) -> np.ndarray:
    if not isinstance(dtype, _DType):
        raise RefusedError("has an array without a type")
    if type(shape) is not tuple or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError("an array whose shape is no tuple of sizes")
    view = memoryview(data)
    array: np.ndarray = np.ndarray(shape, dtype.dtype(), view, order=order)
    if array.nbytes != view.nbytes:
        raise ValueError(f"{view.nbytes} bytes for an array of {array.nbytes}")
    array.setflags(write=False)
    return array


def _scalar(dtype: Any, data: Any) -> Any:
    return _to_array(data, dtype, (), "C").item()


def _encode(text: Any, encoding: Any) -> bytes:
    if to_text(encoding) not in ("latin1", "latin-1"):
        raise RefusedError(f"encodes text as {to_text(encoding)[:50]}")
    return to_text(text).encode("latin-1")


def _empty_dict(*arguments: Any) -> dict[Any, Any]:
    # The argument of a defaultdict is the type of its values; Python 2's OrderedDict has items.
    if arguments and not isinstance(arguments[0], _Global):
        raise RefusedError("calls a dictionary with items")
    return {}


def _not_callable(*_: Any) -> None:
    raise RefusedError("calls a type that is only to be named")


_NUMPY_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "multiarray._reconstruct": _Array,
    "multiarray.scalar": _scalar,
    "numeric._frombuffer": _Array.from_buffer,
}
_ALLOWED: dict[str, Callable[..., Any]] = {
    "numpy.ndarray": _not_callable,
    "numpy.dtype": _DType,
    "_codecs.encode": _encode,
    "collections.OrderedDict": _empty_dict,
    "collections.defaultdict": _empty_dict,
    "builtins.bytes": lambda: b"",
    "builtins.list": _not_callable,
    **{
        f"numpy.{core}.{function}": call
        for core in ("core", "_core")  # NumPy 1 and 2
        for function, call in _NUMPY_FUNCTIONS.items()
    },
}
"""The names that a pickle may use, and the functions that are called in their place."""


_PLAIN_OPCODES = b"".join(
    [
        pickle.PROTO, pickle.STOP, pickle.MARK, pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE,
        pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.BINFLOAT,
        pickle.BINSTRING, pickle.SHORT_BINSTRING, pickle.BINBYTES, pickle.SHORT_BINBYTES,
        pickle.BINBYTES8, pickle.BINUNICODE, pickle.SHORT_BINUNICODE, pickle.BINUNICODE8,
        pickle.EMPTY_LIST, pickle.LIST, pickle.APPEND, pickle.APPENDS, pickle.EMPTY_TUPLE,
        pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.EMPTY_DICT,
        pickle.BINPUT, pickle.LONG_BINPUT, pickle.MEMOIZE, pickle.BINGET, pickle.LONG_BINGET,
        pickle.GLOBAL, pickle.STACK_GLOBAL,
    ]
)  # fmt: skip


class _Opcodes(dict[int, Callable[[Any], None]]):
    def __missing__(self, code: int) -> Callable[[Any], None]:
        raise RefusedError(f"has the instruction {bytes([code])!r}, of objects or of protocol 0")


_Base = pickle._Unpickler  # noqa: SLF001  # the pure-Python one, whose opcodes joblib overrides as well


class _Unpickler(_Base):
    """The standard library's unpickler, limited to the opcodes of plain data."""

    # Attributes of the base class that its stub does not declare.
    stack: list[Any]
    append: Callable[[Any], None]
    read: Callable[[int], bytes]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, source: _Source) -> None:
        super().__init__(source, encoding="bytes")
        self.size, self.encoded = len(source.data), 0

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = _Opcodes(
        {opcode: _Base.dispatch[opcode] for opcode in _PLAIN_OPCODES}
    )
    dispatch[pickle.BYTEARRAY8[0]] = _Base.dispatch[pickle.BINBYTES8[0]]

    def find_class(self, module: str, name: str) -> _Global:
        full_name = f"{module}.{name}".replace("__builtin__.", "builtins.", 1)
        if full_name not in _ALLOWED:
            raise RefusedError(f"names {' '.join(full_name[:_MAX_NAME].split())}")
        return _Global(full_name)

    def _skip_frame(self) -> None:
        self.read(8)  # a frame only announces how much to read at once

    def _set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not dict:
            raise RefusedError(f"fills a {type(target).__name__} as a dictionary")
        for key in items[::2]:
            if not isinstance(key, str | bytes) and not (
                type(key) is int and abs(key) < _MAX_INT_KEY
            ):
                raise RefusedError(f"has a key of type {type(key).__name__}")
        target.update(zip(items[::2], items[1::2], strict=True))

    def _set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set_items([key, value])

    def _reduce(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if not isinstance(function, _Global) or type(arguments) is not tuple:
            raise RefusedError(f"calls a {type(function).__name__}")
        result = _ALLOWED[function.name](*arguments)
        if isinstance(result, bytes):  # encoded text, which a memo could repeat without end
            self.encoded += len(result)
            if self.encoded > self.size:
                raise RefusedError(f"encodes more than its own {self.size:,} bytes of text")
        self.append(result)

    def _build(self) -> None:
        state = self.stack.pop()
        if not isinstance(self.stack[-1], _Array | _DType):
            raise RefusedError(f"gives a {type(self.stack[-1]).__name__} attributes")
        self.stack[-1].set_state(state)

    dispatch[pickle.FRAME[0]] = _skip_frame
    dispatch[pickle.SETITEM[0]] = _set_item
    dispatch[pickle.SETITEMS[0]] = lambda self: self._set_items(self.pop_mark())
    dispatch[pickle.REDUCE[0]] = _reduce
    dispatch[pickle.BUILD[0]] = _build
