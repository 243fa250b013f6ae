"""Kernels in C++, for CPUs, and in Triton, for GPUs, with the autograd functions that call them."""

from metadist.kernels.loader import disable_native, library, native_available
from metadist.kernels.malloc import tune_malloc
from metadist.kernels.transforms import in_transform, pytorch_operations

__all__ = [
    "disable_native",
    "in_transform",
    "library",
    "native_available",
    "pytorch_operations",
    "tune_malloc",
]
