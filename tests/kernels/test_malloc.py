"""Freed memory is reused."""

import ctypes
import platform

import pytest
from worlds import run_world

from metadist.kernels import tune_malloc

BYTES = 30 * 2**20
"""Of a block; more than 32 MB are always mapped in older versions of glibc."""


class MallInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def held_by_the_allocator(tune: bool) -> tuple[int, int]:
    """Bytes that a block of `BYTES` adds to mapped memory, and that stay free in the heap after
    the block has been freed.
    """
    if tune:
        tune_malloc()
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = MallInfo
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    before = libc.mallinfo2()
    block = libc.malloc(BYTES)
    mapped = libc.mallinfo2().hblkhd - before.hblkhd
    libc.free(block)
    return mapped, libc.mallinfo2().fordblks


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_freed_memory_is_kept():
    if not hasattr(ctypes.CDLL(None), "mallinfo2"):
        pytest.skip("needs glibc 2.33")
    ((mapped, kept),) = run_world(held_by_the_allocator, 1, False)
    assert mapped >= BYTES and kept < BYTES  # it goes back to the system
    ((mapped, kept),) = run_world(held_by_the_allocator, 1, True)
    assert mapped == 0 and kept >= BYTES
