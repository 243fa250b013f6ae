"""C++ kernels of the models, and their bindings."""

from metadist.kernels.loader import (
    LANES,
    call,
    can_call,
    disable_native,
    in_transform,
    library,
    native_available,
)
from metadist.kernels.malloc import tune_malloc

__all__ = [
    "LANES",
    "call",
    "can_call",
    "disable_native",
    "in_transform",
    "library",
    "native_available",
    "tune_malloc",
]
