"""Seeds derived from several numbers, and the random generators of many tasks at once.

`numpy.random.default_rng(key)` takes some 20 microseconds, more than the computation of a small
task. Here the keys of a batch are hashed together, or in C++ if tasks need uniform numbers only.
NumPy guarantees the algorithm of `SeedSequence` (Melissa O'Neill's `seed_seq` replacement) and the
seeding of PCG64 (NEP 19).
"""

import ctypes
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor

from metadist.kernels import library

_POOL = 4
_MASK = 2**128 - 1
_PCG_MULTIPLIER = 0x2360ED051FC65DA44385DF649FCCF645


def seed_from(*numbers: int) -> int:
    """A seed of 64 bits that depends on all the numbers and is the same on every platform.

    Args:
        numbers: non-negative integers.
    """
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])


class KeyGenerators:
    """The generators of several tasks, each in the state of `key_generator(key)`.

    When iterated over, they share memory: a generator may be used until the next one is taken.

    Args:
        keys: int64 of shape (tasks, 4), rows of `task_keys`.
    """

    def __init__(self, keys: Tensor) -> None:
        self._keys = keys.numpy()
        # SeedSequence splits a number of 2^32 or more into several words.
        self._short = bool(self._keys.max(initial=0) < 2**32)

    def __iter__(self) -> Iterator[np.random.Generator]:
        if not self._short:
            yield from (np.random.default_rng(key.tolist()) for key in self._keys)
            return
        bits = np.random.PCG64(0)
        generator = np.random.Generator(bits)
        for high, low, sequence_high, sequence_low in _seeds(self._words()).tolist():
            increment = ((((sequence_high << 64) | sequence_low) << 1) | 1) & _MASK
            start = (increment + ((high << 64) | low)) & _MASK
            state: Any = {"state": (start * _PCG_MULTIPLIER + increment) & _MASK, "inc": increment}
            bits.state = {"bit_generator": "PCG64", "state": state, "has_uint32": 0, "uinteger": 0}
            yield generator

    def random(self, count: int) -> np.ndarray:
        """The first uniform numbers of each generator, float64 of shape (tasks, count)."""
        compiled = library("uniform") if self._short else None
        if compiled is None:
            rows = [generator.random(count) for generator in self]
            return np.array(rows).reshape(len(rows), count)
        words, numbers = self._words(), np.empty((len(self._keys), count))
        compiled.uniform(
            ctypes.c_int64(len(words)),
            ctypes.c_int64(count),
            ctypes.c_void_p(words.ctypes.data),
            ctypes.c_void_p(numbers.ctypes.data),
        )
        return numbers

    def _words(self) -> np.ndarray:
        return self._keys.astype(np.uint32, order="C")


def _seeds(entropy: np.ndarray) -> np.ndarray:
    """`SeedSequence(row).generate_state(4, uint64)` of each row, (n, 4) -> (n, 4)."""
    pool = _hash(entropy, *_constants(0x43B0D7E5, 0x931E8875, 0, _POOL))
    for source in range(_POOL):
        targets = [target for target in range(_POOL) if target != source]
        first = _POOL + source * len(targets)
        constants = _constants(0x43B0D7E5, 0x931E8875, first, len(targets))
        mixed = np.uint32(0xCA01F9DD) * pool[:, targets]
        mixed -= np.uint32(0x4973F715) * _hash(pool[:, source, None], *constants)
        pool[:, targets] = mixed ^ (mixed >> np.uint32(16))
    constants = _constants(0x8B51F9DD, 0x58F38DED, 0, 2 * _POOL)
    words = _hash(np.concatenate([pool, pool], 1), *constants).astype(np.uint64)
    return words[:, ::2] | (words[:, 1::2] << np.uint64(32))


def _hash(words: np.ndarray, before: np.ndarray, after: np.ndarray) -> np.ndarray:
    words = (words ^ before) * after
    return words ^ (words >> np.uint32(16))


@functools.cache
def _constants(start: int, factor: int, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Constants of consecutive hashes, from the `first` one: before and after multiplication."""
    powers = [start * pow(factor, first + offset, 2**32) % 2**32 for offset in range(count + 1)]
    constants = np.array(powers, np.uint32)
    return constants[:-1], constants[1:]
