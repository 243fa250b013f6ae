"""A module's tensors by name, and its calls with other tensors than its own."""

from typing import Any

from torch import Tensor, nn


def submodules(module: nn.Module) -> dict[nn.Module, str]:
    """A module and its submodules, each once, with the prefix of the names of its tensors.

    In the order of `named_modules`, which takes twice as long, and training calls it often.

    Args:
        module: the module, whose prefix is "".
    """
    found: dict[nn.Module, str] = {}
    _add_submodules(module, "", found)
    return found


def _add_submodules(module: nn.Module, prefix: str, found: dict[nn.Module, str]) -> None:
    found[module] = prefix
    for name, child in module._modules.items():  # noqa: SLF001
        if child is not None and child not in found:
            _add_submodules(child, f"{prefix}{name}.", found)


def parameters_by_name(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a module, as `named_parameters` yields them, which takes longer.

    Args:
        module: the module.
    """
    return _tensors_by_name(module, "_parameters")


def buffers_by_name(module: nn.Module) -> dict[str, Tensor]:
    """The buffers of a module, as `named_buffers` yields them, which takes longer.

    Args:
        module: the module.
    """
    return _tensors_by_name(module, "_buffers")


def _tensors_by_name(module: nn.Module, kind: str) -> dict[str, Any]:
    found: dict[Tensor, str] = {}
    for submodule, prefix in submodules(module).items():
        for name, tensor in vars(submodule)[kind].items():
            if tensor is not None:
                found.setdefault(tensor, prefix + name)
    return {name: tensor for tensor, name in found.items()}


def call_with(module: nn.Module, tensors: dict[str, Tensor], *inputs: Any) -> Any:
    """Call a module with some of its parameters and buffers replaced, and tied ones with them.

    Like `torch.func.functional_call`, which takes longer, and which does not restore the tensors of
    a submodule that has several names.

    Args:
        module: the module, which is unchanged afterwards.
        tensors: the values of parameters and buffers, by the names of `named_parameters` and
            `named_buffers`. Where the call assigns another tensor to one of them, as to a buffer,
            it is put here.
        inputs: the arguments of the module's `forward`.
    """
    replaced: list[tuple[dict[str, Any], str, Tensor, str]] = []
    first_names: dict[int, str] = {}
    given = dict(tensors)
    try:
        for submodule, prefix in submodules(module).items():
            kinds: Any = submodule._parameters, submodule._buffers  # noqa: SLF001
            for own in kinds:
                for name, tensor in own.items():
                    if tensor is not None:
                        path = first_names.setdefault(id(tensor), prefix + name)
                        if path in given:
                            replaced.append((own, name, tensor, path))
                            own[name] = given[path]
        return module(*inputs)
    finally:
        for own, name, tensor, path in replaced:
            assigned = own.get(name)
            if assigned is not None and assigned is not given[path]:
                tensors[path] = assigned
            own[name] = tensor
