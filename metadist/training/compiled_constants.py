"""The values of a learner that are constants in a compiled step, and whether they changed.

Parameters, buffers and tasks are inputs of a compiled step. Everything else that a learner's
`forward` reads, such as a number or a list among a module's attributes, is a constant in it.
"""

import dataclasses
import enum
import functools
import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from metadist.algorithms.functional import submodules

_NUMBERS_AND_TEXTS = (bool, int, float, str)
_INTERNAL = frozenset(name for name in vars(nn.Module()) if name[0] == "_")
"""The attributes that `nn.Module` has for itself."""

_IMMUTABLE = (bytes, range, torch.dtype, torch.layout, enum.Enum)
_MAX_DEPTH = 8
"""The depth of nested containers up to which values are compared."""


class Constants:
    """The values of the attributes of a learner's modules at one time.

    Numbers, texts, arrays, tensors and submodules are compared by their contents, also inside
    containers, dataclasses and other objects with an equality of their own; of the remaining
    objects, the class is compared. A learner that was sent to a worker has the constants of the
    original. Attributes whose names begin with "_" are only compared if they are numbers or texts.

    Args:
        learner: the learner. Its tensors are copied, as they may change in place.
    """

    def __init__(self, learner: nn.Module) -> None:
        modules = submodules(learner)
        self._prefixes = list(modules.values())
        self._values = [
            {name: _comparable(v, modules, copy=True) for name, v in _attributes(module).items()}
            for module in modules
        ]

    def changed_names(self, learner: nn.Module) -> list[str]:
        """The names of the attributes that differ now; "modules" if the modules do.

        A compiled step calls it every time.

        Args:
            learner: the same learner, or a copy.
        """
        modules = submodules(learner)
        if list(modules.values()) != self._prefixes:
            return ["modules"]
        changed = []
        for (module, prefix), before in zip(modules.items(), self._values, strict=True):
            now = _attributes(module)
            changed += [prefix + name for name in before.keys() ^ now.keys()]
            changed += [
                prefix + name
                for name, value in now.items()
                # A value that cannot change in place stands for itself.
                if value is not before.get(name, value)
                and not _are_equal(before[name], _comparable(value, modules, copy=False))
            ]
        return changed


def _attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module that are compared, with its class and its hooks."""
    attributes = vars(module)
    found: dict[str, Any] = {
        name: value
        for name, value in attributes.items()
        if name not in _INTERNAL and (name[0] != "_" or isinstance(value, _NUMBERS_AND_TEXTS))
    }
    found["__class__"] = type(module)
    before, after = attributes["_forward_pre_hooks"], attributes["_forward_hooks"]
    if before or after:
        hooks = [*before.values(), *after.values()]
        found["forward hooks"] = [
            getattr(hook, "__qualname__", type(hook).__name__) for hook in hooks
        ]
    return found


def _are_equal(before: Any, now: Any) -> bool:
    try:
        return bool(before == now)
    except Exception:  # of a type that cannot be compared, such as a sparse tensor
        return False


def _comparable(value: Any, modules: Mapping[nn.Module, str], copy: bool, depth: int = 0) -> Any:
    if isinstance(value, _NUMBERS_AND_TEXTS):
        return value if value == value else "NaN"
    if isinstance(value, Tensor):
        return _TensorValue(value, copy)
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, value.tobytes()
    if isinstance(value, nn.Module):
        return modules.get(value, type(value).__name__)
    if isinstance(value, Set):
        return frozenset(value)
    if isinstance(value, MethodType):
        return value.__func__
    is_function_or_class = hasattr(value, "__qualname__")
    if value is None or is_function_or_class or isinstance(value, _IMMUTABLE):
        return value
    kind: Any = type(value)
    items: Iterable[Any] = ()
    if depth > _MAX_DEPTH:
        return kind
    if isinstance(value, functools.partial):
        items = (value.func, value.args, value.keywords)
    elif isinstance(value, Mapping):
        items = [*value, *value.values()]
    elif isinstance(value, Sequence):
        items = value
    elif dataclasses.is_dataclass(value):  # it may have slots
        items = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    # Copies of other objects, such as random generators, may never be equal.
    elif kind.__eq__ is not object.__eq__:
        # An object is equal to itself, also after a change of its attributes.
        if not hasattr(value, "__dict__"):
            return value
        items = [*vars(value), *vars(value).values()]
    contents = [_comparable(item, modules, copy, depth + 1) for item in items]
    same = kind is tuple and all(map(operator.is_, contents, value))
    return value if same else (kind, contents)


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
