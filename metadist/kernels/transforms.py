"""What the kernels need to know of PyTorch's transforms, tracers and modes of differentiation."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual


@contextmanager
def pytorch_operations() -> Iterator[None]:
    """Use PyTorch's operations, which can be traced, instead of the kernels in the block."""
    token = _tracing.set(True)
    try:
        yield
    finally:
        _tracing.reset(token)


_tracing: ContextVar[bool] = ContextVar("tracing", default=False)


def is_traced() -> bool:
    """Whether `pytorch_operations` is active; never while `torch.compile` traces the model."""
    # First the mode: PyTorch 2.9 cannot trace a ContextVar.
    return not torch.compiler.is_compiling() and _tracing.get()


def in_functorch() -> bool:
    """Whether a torch.func transform, such as vmap, is active."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def in_transform() -> bool:
    """Whether a torch.func transform, such as vmap, or `pytorch_operations` is active."""
    return is_traced() or in_functorch()


def in_dispatch_mode() -> bool:
    """Whether a mode sees PyTorch's operations, such as fake tensors or `make_fx`."""
    before_autograd = torch._ops._len_torch_dispatch_stack_pre_dispatch()
    return bool(torch._C._len_torch_dispatch_stack() or before_autograd)


def has_tangent(tensor: Tensor | None) -> bool:
    """Whether a tensor has a tangent of forward-mode differentiation."""
    return tensor is not None and unpack_dual(tensor).tangent is not None


def has_memory(tensors: Iterable[Tensor | None]) -> bool:
    """Whether no tensor is of a subclass with a `__torch_dispatch__` of its own.

    Such tensors, like DTensor and fake tensors, may have no memory. None is skipped.
    """
    for tensor in tensors:  # `all` with a generator takes twice as long
        if tensor is not None and type(tensor).__torch_dispatch__ is not _NO_DISPATCH:
            return False
    return True


_NO_DISPATCH = Tensor.__torch_dispatch__


def is_eager(*tensors: Tensor | None) -> bool:
    """Whether an autograd function without a `jvp` can be run on tensors, and read their memory.

    It cannot under torch.func transforms, dispatch modes (such as fake tensors or a counter of
    operations), torch.compile, torch.jit.trace and `pytorch_operations`, nor for tensors with a
    tangent of forward-mode differentiation or with a dispatch of their own. None is skipped.
    """
    # First the compiler, which cannot trace the other conditions.
    if torch.compiler.is_compiling() or in_transform() or in_dispatch_mode():
        return False
    for tensor in tensors:  # `any` with a generator takes twice as long
        if has_tangent(tensor):
            return False
    return has_memory(tensors) and not torch.jit.is_tracing()


def is_transformed(gradient: Tensor) -> bool:
    """Whether a gradient arrives in a torch.func transform, batched or with a tangent.

    Batched gradients are those of `is_grads_batched` in `torch.autograd.grad`.
    """
    return not torch.compiler.is_compiling() and (
        in_functorch()
        or torch._C._functorch.is_legacy_batchedtensor(gradient)
        or has_tangent(gradient)
    )


def differentiable_gradients(
    function: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor],
    gradients: Sequence[Tensor],
) -> tuple[Tensor | None, ...]:
    """The gradients of a function, recorded for further derivatives; None for constant inputs.

    Args:
        function: a function of tensors, in operations whose derivatives autograd knows.
        inputs: its arguments.
        gradients: the gradient with respect to each of its outputs.
    """
    with torch.enable_grad():
        # Aliases, since an input may be another one or computed from it.
        aliases = [tensor.view_as(tensor) for tensor in inputs]
        required = [alias for alias in aliases if alias.requires_grad]
        pairs = zip(function(*aliases), gradients, strict=True)
        outputs, arriving = zip(*(pair for pair in pairs if pair[0].requires_grad), strict=True)
        options = {"create_graph": True, "allow_unused": True}
        found = iter(torch.autograd.grad(outputs, required, arriving, **options))
    return tuple(next(found) if alias.requires_grad else None for alias in aliases)
