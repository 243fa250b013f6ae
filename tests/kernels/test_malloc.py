"""Freed memory is reused."""

import platform
import resource

import pytest
import torch
from worlds import run_world

from metadist.kernels import tune_malloc


def page_faults(keep: bool) -> int:
    """Page faults of a process that allocates and frees 40 MB, twenty times."""
    if keep:
        tune_malloc()
    torch.ones(10 * 2**20)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.ones(10 * 2**20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_freed_memory_is_kept():
    default, tuned = (run_world(page_faults, 1, keep)[0] for keep in (False, True))
    assert tuned < default / 5
