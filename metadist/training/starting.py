"""A quick start: optimizers without PyTorch's compiler."""

import functools
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
from torch.optim import Optimizer, optimizer


def leave_compiler_out() -> None:
    """Let PyTorch's optimizers work without its compiler, unless it is loaded already.

    Their methods tell the compiler to leave them out, and load it (torch._dynamo) to say so, which
    takes half of the time that a run needs to start. Where nothing is compiled there is nobody to
    tell. It holds for this process; where PyTorch is made otherwise, nothing changes.
    """
    if "torch._dynamo" in sys.modules:
        return
    exempt = _code_of(torch, "_disable_dynamo")
    graded = _code_of(optimizer, "_use_grad_for_differentiable")
    for kind in (Optimizer, *Optimizer.__subclasses__()):
        for name, method in list(vars(kind).items()):
            code = getattr(method, "__code__", None)
            if code is None:
                continue
            if code is exempt:  # it looks here for the form of itself that is left out
                method.__wrapped__.__dynamo_disable = method.__wrapped__
            elif code is graded:
                setattr(kind, name, _graded(method.__wrapped__))


def _code_of(module: Any, decorator: str) -> CodeType | None:
    """The code that everything shares which a decorator of PyTorch has wrapped."""
    decorate = getattr(module, decorator, None)
    wrapped = None if decorate is None else decorate(lambda: None)
    return getattr(wrapped, "__code__", None)


def _graded(step: Callable) -> Callable:
    """A step that is differentiable or not, as its optimizer says."""

    @functools.wraps(step)
    def in_mode(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return step(self, *args, **kwargs)

    return in_mode
