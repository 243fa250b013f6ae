"""The values of a learner that are constants in a compiled step, and whether they changed.

Parameters, buffers and tasks are inputs of a compiled step. Everything else that a learner's
`forward` reads, such as a number or a list among a module's attributes, is a constant in it.
"""

import dataclasses
import enum
import functools
import operator
from collections.abc import Mapping, Sequence, Set
from types import MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from metadist.algorithms.functional import submodules

_NUMBERS_AND_TEXTS = (bool, int, float, str)
_MAX_DEPTH = 8
"""The depth of nested containers up to which values are compared."""

_MISSING = object()
_NAN = "NaN"
"""Stands for a number that does not equal itself."""

_OF_MODULES = frozenset(vars(nn.Module()))
"""The attributes that `nn.Module` has for itself."""


class Constants:
    """The values of the attributes of a learner's modules at one time.

    Numbers, texts, arrays, tensors and submodules are compared by their contents, also inside
    containers, dataclasses and `SimpleNamespace`s; of other objects without an equality of their
    own, the class is compared. A learner that was sent to a worker has the constants of the
    original. Attributes whose names begin with "_" are only compared if they are numbers or texts.

    Args:
        learner: the learner. Its tensors are copied, as they may change in place.
    """

    def __init__(self, learner: nn.Module) -> None:
        snapshot = _Snapshot(learner, copy=True)
        self._modules = []
        for module in learner.modules():
            attributes = vars(module)
            values = {
                name: snapshot.of(value)
                for name, value in attributes.items()
                if _is_compared(name, value)
            }
            others = [name for name in attributes if name not in values and name not in _OF_MODULES]
            self._modules.append(
                _Module(type(module), set(attributes), values, others, _hook_names(attributes))
            )

    def changed_names(self, learner: nn.Module) -> list[str]:
        """The names of the attributes that differ now; "modules" if the number of modules does.

        A compiled step calls it every time.

        Args:
            learner: the same learner, or a copy.
        """
        modules = submodules(learner)
        if len(modules) != len(self._modules):
            return ["modules"]
        snapshot = _Snapshot(learner, copy=False)
        changed = []
        for number, (module, before) in enumerate(zip(modules, self._modules, strict=True)):
            attributes = vars(module)
            if type(module) is not before.kind:
                changed.append((number, type(module).__name__))
            if _hook_names(attributes) != before.hooks:
                changed.append((number, "forward hooks"))
            for name, value in before.values.items():
                now = attributes.get(name, _MISSING)
                if now is not value and not _equal(snapshot, now, value):
                    changed.append((number, name))
            candidates = before.uncompared
            if attributes.keys() != before.names:
                candidates = [name for name in attributes if name not in before.values]
            for name in candidates:
                if _is_compared(name, attributes[name]):
                    changed.append((number, name))
        if not changed:
            return []
        paths = [path for path, _ in learner.named_modules()]
        return [f"{paths[number]}.{name}".lstrip(".") for number, name in changed]


class _Module(NamedTuple):
    """The attributes of a module at one time.

    Attributes:
        kind: the module's class.
        names: the names of all attributes.
        values: the compared attributes; see `_Snapshot`.
        uncompared: private attributes that are no numbers or texts, and may become such.
        hooks: the names of the hooks that are called with `forward`.
    """

    kind: type
    names: set[str]
    values: dict[str, Any]
    uncompared: list[str]
    hooks: list[str]


def _equal(snapshot: "_Snapshot", now: Any, before: Any) -> bool:
    try:
        return bool(snapshot.of(now) == before)
    except Exception:  # of a type that cannot be compared, such as a sparse tensor
        return False


def _hook_names(attributes: dict[str, Any]) -> list[str]:
    """The names of a module's hooks that are called with `forward`."""
    before, after = attributes["_forward_pre_hooks"], attributes["_forward_hooks"]
    if not before and not after:
        return []
    hooks = [*before.values(), *after.values()]
    return [getattr(hook, "__qualname__", type(hook).__name__) for hook in hooks]


def _is_compared(name: str, value: Any) -> bool:
    return name[0] != "_" or isinstance(value, _NUMBERS_AND_TEXTS)


class _Snapshot:
    """Makes values comparable by their contents."""

    def __init__(self, learner: nn.Module, copy: bool) -> None:
        self._learner = learner
        self._copy = copy
        self._paths: dict[int, str] = {}

    def of(self, value: Any, depth: int = 0) -> Any:
        """A value that is equal for two values whose contents are equal."""
        if isinstance(value, _NUMBERS_AND_TEXTS):
            return _NAN if value != value else value
        if depth > _MAX_DEPTH:
            return type(value)
        if isinstance(value, Tensor):
            return _TensorValue(value, self._copy)
        if isinstance(value, np.ndarray):
            return _ArrayValue(value.copy() if self._copy else value)
        if isinstance(value, nn.Module):
            return self._path(value)
        if isinstance(value, functools.partial):
            return self.of((value.func, value.args, value.keywords), depth + 1)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
            return type(value), self.of(fields, depth + 1)
        if isinstance(value, Mapping):
            return tuple((key, self.of(item, depth + 1)) for key, item in value.items())
        if isinstance(value, Set):
            return frozenset(value)
        if isinstance(value, bytes | range):
            return value
        if isinstance(value, Sequence):
            items = tuple(self.of(item, depth + 1) for item in value)
            same = type(value) is tuple and all(map(operator.is_, items, value))
            return value if same else items  # the same tuple is found equal at once
        if isinstance(value, MethodType):
            return value.__func__
        # Copies of other objects, such as random generators, may never be equal.
        kind: Any = type(value)
        if _is_singleton(value):
            return value
        if kind.__eq__ is object.__eq__:
            return kind
        # An object is equal to itself, also after a change of its attributes.
        if hasattr(kind, "__attrs_attrs__"):  # it may have slots
            values = [getattr(value, field.name, None) for field in kind.__attrs_attrs__]
            return kind, self.of(values, depth + 1)
        return (kind, self.of(vars(value), depth + 1)) if hasattr(value, "__dict__") else value

    def _path(self, module: nn.Module) -> str:
        """The name of a submodule, or the class name of a module outside the learner."""
        if not self._paths:
            self._paths = {id(submodule): name for name, submodule in self._learner.named_modules()}
        return self._paths.get(id(module), type(module).__name__)


def _is_singleton(value: Any) -> bool:
    """Whether copies of the value are the same object: classes, functions, dtypes, enums."""
    singletons = type | torch.dtype | torch.layout | enum.Enum
    return isinstance(value, singletons) or hasattr(value, "__qualname__")


class _ArrayValue:
    """The content of a NumPy array; equal to another one with the same content."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _ArrayValue) or self._array.dtype != other._array.dtype:
            return False
        has_nan = self._array.dtype.kind in "fc"
        return np.array_equal(self._array, other._array, equal_nan=has_nan)

    __hash__ = None  # type: ignore[assignment]


class _TensorValue:
    """The content of a tensor at one time; equal to another one with the same content."""

    def __init__(self, tensor: Tensor, copy: bool) -> None:
        self._tensor = tensor
        self._version = -1 if tensor.is_inference() else tensor._version  # noqa: SLF001
        self._content = tensor.detach().clone() if copy else tensor.detach()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _TensorValue):
            return False
        if self._tensor is other._tensor and self._version == other._version >= 0:
            return True
        mine, theirs = self._content, other._content
        if (mine.dtype, mine.device, mine.shape) != (theirs.dtype, theirs.device, theirs.shape):
            return False
        if mine.is_floating_point():
            return torch.allclose(mine, theirs, rtol=0, atol=0, equal_nan=True)
        return torch.equal(mine, theirs)

    __hash__ = None  # type: ignore[assignment]
