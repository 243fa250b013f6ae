"""Clones of modules, whose parameters can be differentiable functions of the original's."""

import copy
import pickle
import sys
import types
from collections.abc import Callable, Container, Mapping
from typing import Any, Literal, TypeVar

import optree
import torch
from torch import Tensor, nn

from metadist.errors import UserError, first_line

M = TypeVar("M", bound=nn.Module)

CloneMethod = Literal["reference", "clone", "copy", "deepcopy"]


def module_clone(
    module: M,
    *,
    by: CloneMethod = "reference",
    detach_buffers: bool = False,
    device: torch.device | str | None = None,
) -> M:
    """A copy of a module's structure, hooks included. The original is unchanged.

    RPC detaches an `nn.Parameter` from the graph, but keeps the graph of plain tensors: send
    `module_clone(model, by="clone")` to get gradients back in the model's parameters.

    Args:
        module: the module to clone, submodules and shared parameters included.
        by: "reference" shares the parameters' memory: the clone's parameters are the
            original's until they are replaced. "clone" or "copy" makes each a differentiable
            clone, a plain tensor with a `grad_fn` that leads to the original's parameter.
            "deepcopy" makes new, independent parameters without a graph between the two.
        detach_buffers: whether to copy the buffers, so that the original's running statistics do
            not change. "clone", "copy" and "deepcopy" always copy them.
        device: the clone's device; the move is differentiable except by "deepcopy". Default: the
            original's device.

    Raises:
        UserError: `by` is unknown.
    """
    if by not in ("reference", "clone", "copy", "deepcopy"):
        raise UserError(
            f'module_clone(by={by!r}): expected "reference", "clone", "copy" or "deepcopy".'
        )
    if by == "deepcopy":
        clone = copy.deepcopy(module)
        return clone if device is None else clone.to(device)

    def parameter(tensor: Tensor) -> Tensor:
        moved = tensor if device is None else tensor.to(device)
        return moved.clone() if by != "reference" and moved is tensor else moved

    def buffer(tensor: Tensor) -> Tensor:
        moved = tensor if device is None else tensor.to(device)
        must_copy = detach_buffers or by != "reference"
        return moved.detach().clone() if must_copy and moved is tensor else moved

    modules: dict[int, Any] = {}
    clone = _clone(module, parameter, buffer, modules, {})
    dynamo = sys.modules.get("torch._dynamo")
    for submodule in modules.values():
        attributes = vars(submodule)
        for name, value in attributes.items():
            if name in _HOOKS:
                if value and isinstance(value, dict):  # hooks may be methods
                    for key, hook in value.items():
                        value[key] = _replace_modules(hook, modules)
            elif type(value) not in _CONSTANTS and name not in _CONTENTS:
                attributes[name] = _replace_modules(value, modules)
        if dynamo is not None and isinstance(submodule, dynamo.OptimizedModule):
            submodule.__setstate__(submodule.__getstate__())  # its `forward` calls the original
    return clone


def _replace_modules(value: Any, modules: Mapping[int, nn.Module]) -> Any:
    """An attribute's value with modules replaced by their clones.

    The value may be a list of submodules, or a method as in `self.activation = self.fast`.
    """
    if isinstance(value, list | tuple | dict):
        tree: Any = value
        leaves, structure = optree.tree_flatten(tree, none_is_leaf=True)
        if any(leaf is value for leaf in leaves):  # a subclass that optree does not know
            return value
        replaced = [_replace_modules(leaf, modules) for leaf in leaves]
        unchanged = all(a is b for a, b in zip(leaves, replaced, strict=True))
        return value if unchanged else optree.tree_unflatten(structure, replaced)
    if isinstance(value, types.MethodType) and id(value.__self__) in modules:
        return types.MethodType(value.__func__, modules[id(value.__self__)])
    return modules.get(id(value), value) if isinstance(value, nn.Module) else value


def _clone(
    module: M,
    parameter: Callable[[Tensor], Tensor],
    buffer: Callable[[Tensor], Tensor],
    modules: dict[int, Any],
    tensors: dict[int, Tensor],
) -> M:
    if id(module) in modules:
        return modules[id(module)]
    clone = modules[id(module)] = module.__new__(type(module))
    attributes = clone.__dict__ = module.__dict__.copy()
    attributes.pop("_compiled_call_impl", None)  # of `Module.compile`: it calls the original
    for name in _HOOKS:
        if name in attributes:
            attributes[name] = attributes[name].copy()

    def once(make: Callable[[Tensor], Tensor], tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        if id(tensor) not in tensors:
            tensors[id(tensor)] = make(tensor)
        return tensors[id(tensor)]

    # Not by `__setattr__`, which would search the registries for each.
    attributes["_parameters"] = {n: once(parameter, t) for n, t in module._parameters.items()}
    attributes["_buffers"] = {n: once(buffer, t) for n, t in module._buffers.items()}
    attributes["_modules"] = {
        name: None if child is None else _clone(child, parameter, buffer, modules, tensors)
        for name, child in module._modules.items()
    }
    if isinstance(clone, nn.RNNBase):
        # RNNs keep a second list of their weights.
        clone.__dict__["_flat_weights"] = [
            getattr(clone, n, None) for n in clone._flat_weights_names
        ]
    return clone


_CONTENTS = {"_parameters", "_buffers", "_modules"}
"""Attributes of every module in which its contents are registered."""

_HOOKS = {
    name for name, value in vars(nn.Module()).items() if isinstance(value, dict | set)
} - _CONTENTS
"""Attributes of every module in which hooks, and the names of some buffers, are registered."""

_CONSTANTS = {bool, int, float, str, type(None)}
"""Types of attributes that clones share."""


def unpicklable_part(module: nn.Module) -> str:
    """The attribute because of which a module cannot be pickled, and the reason.

    Returns:
        A text such as "model.head._forward_hooks: Can't pickle local object 'f.<locals>.hook'"; ""
        if the module can be pickled, its tensors aside.
    """
    error = _pickling_error(module)
    modules = {id(submodule) for submodule in module.modules()}
    for path, submodule in module.named_modules() if error else ():
        if _pickling_error(submodule, modules - {id(submodule)}):
            for name, value in [*vars(submodule).items(), ("", submodule)]:
                if reason := _pickling_error(value, modules - {id(value)}):
                    part = ".".join(filter(None, (path, name))) or type(module).__name__
                    return f"{part}: {reason}"
    return error


def _pickling_error(value: Any, left_out: Container[int] = ()) -> str:
    """Why a value cannot be pickled, without tensors and objects of some ids; "" if it can be."""
    try:
        _Pickler(left_out).dump(value)
    except Exception as error:  # the user's own __reduce__ may raise any
        return first_line(error)
    return ""


class _Pickler(pickle.Pickler):
    def __init__(self, left_out: Container[int]) -> None:
        super().__init__(types.SimpleNamespace(write=len))  # drops the output
        self._left_out = left_out

    def persistent_id(self, obj: Any) -> str | None:
        return "" if isinstance(obj, Tensor) or id(obj) in self._left_out else None
