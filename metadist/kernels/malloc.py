"""Settings of glibc's allocator."""

import ctypes
import os
import sys

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8  # in glibc's malloc.h


def _mallopt(parameter: int, value: int) -> bool:
    """Set a parameter of the allocator, and return whether it accepts it."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        return bool(ctypes.CDLL(None).mallopt(parameter, value))
    except (OSError, AttributeError):  # other C libraries
        return False


def tune_malloc() -> None:
    """Let the process reuse the memory of freed tensors. Every rank calls it.

    By default glibc returns large blocks to the system, so that each new tensor is mapped and
    zeroed again; this takes a sixth of the time of conv4 with max-pooling. With these settings the
    process keeps its peak memory. They have no effect with other C libraries.
    """
    # Older versions reject more than 32 MB. The other settings do harm without this threshold.
    if _mallopt(_MMAP_THRESHOLD, 2**30) or _mallopt(_MMAP_THRESHOLD, 2**25):
        _mallopt(_TRIM_THRESHOLD, 2**31 - 1)
        _mallopt(_TOP_PAD, 2**26)


def use_one_malloc_arena() -> None:
    """Let all threads share glibc's first arena, unless MALLOC_ARENA_MAX is set.

    The threads of RPC's agent take turns. If each had its own arena, each would keep the memory of
    the largest graph recorded on it for a distributed autograd context: several times as much.
    """
    if "MALLOC_ARENA_MAX" not in os.environ:
        _mallopt(_ARENA_MAX, 1)
