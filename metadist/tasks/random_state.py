"""The global random generators of torch, NumPy and Python."""

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch

_CPU = torch.device("cpu")
_GOLDEN_RATIO = 0x9E3779B97F4A7C15  # times 2^64: the factor of Fibonacci hashing


def seed_generators(seed: int, device: torch.device = _CPU) -> None:
    """Seed the global generators of torch, NumPy and Python.

    Args:
        seed: an integer from 0 to 2^64 - 1.
        device: the device whose generator is seeded in addition to the CPU's.
    """
    # torch.manual_seed would seed all GPUs, and record a stack trace for each unused one.
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)
    # Not the same seed: NumPy's generator is torch's, and would give the same numbers.
    np.random.seed(((seed + 1) * _GOLDEN_RATIO >> 32) % 2**32)
    random.seed(seed)


@contextlib.contextmanager
def random_state(seed: int, device: torch.device = _CPU) -> Iterator[None]:
    """Seed the global generators in the block, and restore their states after it.

    Args:
        seed: see `seed_generators`.
        device: see `seed_generators`.
    """
    with preserved_random_state(device):
        seed_generators(seed, device)
        yield


@contextlib.contextmanager
def preserved_random_state(device: torch.device) -> Iterator[None]:
    """Restore the states of the global generators of torch, NumPy and Python after the block.

    Args:
        device: see `seed_generators`.
    """
    states = np.random.get_state(), random.getstate()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        np.random.set_state(states[0])
        random.setstate(states[1])
