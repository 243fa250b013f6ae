"""The values that a compiled step has as constants of its learner, and whether they have changed.

Parameters, buffers and tasks are inputs of a compiled step. Everything else that a learner's
`forward` reads, such as a number or a list among a module's attributes, is a constant in it.
"""

from collections.abc import Mapping, Sequence, Set
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_NUMBERS_AND_TEXTS = (bool, int, float, str)
_MAX_DEPTH = 8
"""Of attributes of attributes; deeper values are not compared."""

_MISSING = object()


class Constants:
    """The values of the attributes of a learner's modules at one time.

    They are compared by content: numbers, texts, arrays, tensors and submodules, also inside of
    containers and other objects. A learner that was sent to a worker has the constants of the
    original. Names that begin with "_", which `nn.Module` has for itself, are only compared if they
    are numbers or texts.

    Args:
        learner: the learner. Its tensors are copied, as they may change in place.
    """

    def __init__(self, learner: nn.Module) -> None:
        snapshot = _Snapshot(learner, copy=True)
        self._values = [
            {
                name: snapshot.of(value)
                for name, value in vars(module).items()
                if _is_compared(name, value)
            }
            for module in learner.modules()
        ]
        self._sizes = [len(vars(module)) for module in learner.modules()]

    def changed_names(self, learner: nn.Module) -> list[str]:
        """The names of the attributes that differ now; "modules" if the number of modules does.

        A compiled step calls it every time.

        Args:
            learner: the same learner, or a copy.
        """
        modules = list(learner.modules())
        if len(modules) != len(self._values):
            return ["modules"]
        snapshot = _Snapshot(learner, copy=False)
        changed = []
        for number, (module, values) in enumerate(zip(modules, self._values, strict=True)):
            attributes = vars(module)
            for name, value in values.items():
                now = attributes.get(name, _MISSING)
                if now is not value and snapshot.of(now) != value:
                    changed.append((number, name))
            if len(attributes) != self._sizes[number]:
                changed += [
                    (number, name)
                    for name, value in attributes.items()
                    if name not in values and _is_compared(name, value)
                ]
        if not changed:
            return []
        paths = [path for path, _ in learner.named_modules()]
        return [f"{paths[number]}.{name}".lstrip(".") for number, name in changed]


def _is_compared(name: str, value: Any) -> bool:
    return name[0] != "_" or isinstance(value, _NUMBERS_AND_TEXTS)


class _Snapshot:
    """Makes values comparable by their contents."""

    def __init__(self, learner: nn.Module, copy: bool) -> None:
        self._learner = learner
        self._copy = copy
        self._paths: dict[int, str] = {}

    def of(self, value: Any, depth: int = 0) -> Any:
        """What equals the same of another value if their contents are equal."""
        if isinstance(value, _NUMBERS_AND_TEXTS) or depth > _MAX_DEPTH:
            return value if depth <= _MAX_DEPTH else None
        if isinstance(value, Tensor):
            return _TensorValue(value, self._copy)
        if isinstance(value, nn.Module):
            return self._path(value)
        if isinstance(value, np.ndarray):
            return value.dtype, value.shape, value.tobytes()
        if isinstance(value, Mapping):
            return tuple((key, self.of(each, depth + 1)) for key, each in value.items())
        if isinstance(value, Set):
            return frozenset(value)
        if isinstance(value, Sequence):
            return tuple(self.of(each, depth + 1) for each in value)
        if isinstance(value, MethodType):
            return value.__func__
        if isinstance(value, type | FunctionType | BuiltinFunctionType):
            return value
        attributes = getattr(value, "__dict__", None)
        if attributes:
            return type(value), self.of(attributes, depth + 1)
        return value

    def _path(self, module: nn.Module) -> str:
        """The name of a submodule; of others their class."""
        if not self._paths:
            self._paths = {id(each): name for name, each in self._learner.named_modules()}
        return self._paths.get(id(module), type(module).__name__)


class _TensorValue:
    """A tensor at one time. It equals another one of the same content."""

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
        alike = (mine.dtype, mine.device) == (theirs.dtype, theirs.device)
        return alike and torch.equal(mine, theirs)

    __hash__ = None  # type: ignore[assignment]
