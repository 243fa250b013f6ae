"""Settings of glibc's allocator."""

import ctypes
import sys

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # parameters of mallopt


def tune_malloc() -> None:
    """Let the process reuse the memory of freed tensors. Every rank calls it.

    By default glibc returns large blocks to the system, so that each new tensor is mapped and
    zeroed again; this takes a sixth of the time of conv4 with max-pooling. With these settings the
    process keeps its peak memory. They have no effect with other C libraries.
    """
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    # Older versions reject more than 32 MB. The other settings do harm without this threshold.
    if not (mallopt(_MMAP_THRESHOLD, 2**30) or mallopt(_MMAP_THRESHOLD, 2**25)):
        return
    mallopt(_TRIM_THRESHOLD, 2**31 - 1)
    mallopt(_TOP_PAD, 2**26)
