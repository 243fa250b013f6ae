"""Whether C++ does part of the work: it rounds otherwise than PyTorch, so all ranks agree."""

from torch import nn

from metadist import kernels as native


def compiles(learner: nn.Module) -> bool | None:
    """Whether this machine has the C++ that a learner's parts ask for; None if they ask for none.

    Any rank may call it; the first on a machine compiles, in some seconds.
    """
    if not any(getattr(part, "native", False) for part in learner.modules()):
        return None
    return native.have_compiled()


def do_without(learner: nn.Module) -> None:
    """Leave the work to PyTorch, whatever the learner's parts ask for."""
    for part in learner.modules():
        if hasattr(part, "native"):
            part.native = False
