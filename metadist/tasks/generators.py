"""Seeds derived from several numbers, and the random generators of many tasks at once.

`numpy.random.default_rng(key)` takes some 20 microseconds, more than the computation of a small
task. If tasks need uniform numbers only, these are drawn in C++.
"""

import ctypes
from collections.abc import Iterator

import numpy as np
from torch import Tensor

from metadist.kernels import library


def seed_from(*numbers: int) -> int:
    """A seed of 64 bits that depends on all the numbers and is the same on every platform.

    Args:
        numbers: non-negative integers.
    """
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])


class KeyGenerators:
    """The generators of several tasks, each in the state of `key_generator(key)`.

    Args:
        keys: int64 of shape (tasks, 4), rows of `task_keys`.
    """

    def __init__(self, keys: Tensor) -> None:
        self._keys = keys.numpy()

    def __iter__(self) -> Iterator[np.random.Generator]:
        words = self._words()
        return map(np.random.default_rng, self._keys.tolist() if words is None else words)

    def random(self, count: int) -> np.ndarray:
        """The first uniform numbers of each generator, float64 of shape (tasks, count)."""
        words, compiled = self._words(), library("uniform")
        if words is None or compiled is None:
            rows = [generator.random(count) for generator in self]
            return np.array(rows).reshape(len(rows), count)
        numbers = np.empty((len(words), count))
        compiled.uniform(
            ctypes.c_int64(len(words)),
            ctypes.c_int64(count),
            ctypes.c_void_p(words.ctypes.data),
            ctypes.c_void_p(numbers.ctypes.data),
        )
        return numbers

    def _words(self) -> np.ndarray | None:
        """The keys as words of `SeedSequence`, which takes them in a third of the time of integers.

        None for numbers of 2^32 or more, which have several words.
        """
        if self._keys.max(initial=0) >= 2**32:
            return None
        return self._keys.astype(np.uint32, order="C")
