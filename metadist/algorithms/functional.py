"""Calls of modules with other parameters and buffers than their own."""

from typing import Any

from torch import Tensor, nn


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
        for prefix, submodule in module.named_modules():  # each submodule once
            kinds: Any = submodule._parameters, submodule._buffers  # noqa: SLF001
            for own in kinds:
                for name, tensor in own.items():
                    path = f"{prefix}.{name}" if prefix else name
                    if tensor is not None:
                        path = first_names.setdefault(id(tensor), path)
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
