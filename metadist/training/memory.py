"""How the process asks the operating system for memory."""

import ctypes
import sys

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # of glibc's mallopt


def keep_freed_memory() -> None:
    """Let the process keep the memory that tensors free, for the next ones. Every rank calls it.

    By itself glibc gives every large piece back to the system, and each new tensor is zeroed and
    mapped again, page by page: a sixth of the time of a conv4 with max-pooling. The process then
    stays as large as it once was. Where the C library is another one nothing happens.
    """
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    # Older versions refuse a threshold beyond 32 MB; without any the others would do harm.
    if not (mallopt(_MMAP_THRESHOLD, 2**30) or mallopt(_MMAP_THRESHOLD, 2**25)):
        return
    mallopt(_TRIM_THRESHOLD, 2**31 - 1)
    mallopt(_TOP_PAD, 2**26)
