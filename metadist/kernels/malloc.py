"""Settings of glibc's allocator."""

import ctypes
import sys

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # of mallopt


def tune_malloc() -> None:
    """Let the process reuse the memory of freed tensors. Every rank calls it.

    By default glibc returns every large block to the system, and each new tensor is mapped and
    zeroed again, which takes a sixth of the time of conv4 with max-pooling. The process keeps its
    peak memory. No effect with other C libraries.
    """
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    # Older versions reject more than 32 MB; without this threshold the others are harmful.
    if not (mallopt(_MMAP_THRESHOLD, 2**30) or mallopt(_MMAP_THRESHOLD, 2**25)):
        return
    mallopt(_TRIM_THRESHOLD, 2**31 - 1)
    mallopt(_TOP_PAD, 2**26)
