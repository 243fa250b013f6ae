"""Calls of modules with other parameters and buffers than their own."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call


def call_with(module: nn.Module, tensors: Mapping[str, Tensor], *inputs: Any) -> Any:
    """Call a module with some of its parameters and buffers replaced, and tied ones with them.

    `torch.func.functional_call` does not restore the tensors of a submodule that has several names.

    Args:
        module: the module, which is unchanged afterwards.
        tensors: the values of parameters and buffers, by the names of `named_parameters` and
            `named_buffers`.
        inputs: the arguments of the module's `forward`.
    """
    tied: dict[int, list[str]] = {}
    for prefix, submodule in module.named_modules():  # each submodule once
        for own in (submodule._parameters, submodule._buffers):  # noqa: SLF001
            for name, tensor in own.items():
                if tensor is not None:
                    names = tied.setdefault(id(tensor), [])
                    names.append(f"{prefix}.{name}" if prefix else name)
    given = {
        name: tensors[names[0]] for names in tied.values() if names[0] in tensors for name in names
    }
    return functional_call(module, {**tensors, **given}, inputs, tie_weights=False)
