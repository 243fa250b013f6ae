"""Sampling of small training tasks in advance."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from metadist.tasks.episode import Episode, Examples, key_split
from metadist.tasks.generators import KeyGenerators

_MAX_TASKS = 256
_MAX_ELEMENTS = 2**17
"""Bounds of the tasks, and of the elements of their tensors, that are sampled together."""

_NEXT_ITERATION = torch.tensor([0, 0, 1, 0])

Counts = tuple[int, int, int]
"""Ways, shots and queries of a task."""


class _Tasks(NamedTuple):
    dataset: Any
    counts: Counts
    keys: Tensor
    episodes: Episode | None = None


class LookAhead:
    """Samples the tasks of several iterations at once, which takes little longer than those of one.

    It does so when it is asked for the tasks of consecutive iterations, as in training. A task
    depends on dataset, counts and key alone, so that the tasks are the same in any case.
    """

    def __init__(self) -> None:
        self._iterations = 1
        # The tasks of the next iterations, the first one last; those of the last are not sampled.
        self._ahead: list[_Tasks] = []

    def __reduce__(self) -> tuple:
        return LookAhead, ()

    def __call__(self, dataset: Any, keys: Tensor, counts: Counts) -> Episode:
        """The stacked tasks of some keys.

        Args:
            dataset: a dataset with `episodes`, which does not change.
            keys: int64 of shape (tasks, 4).
            counts: ways, shots and queries.
        """
        ahead, iterations = self._ahead, self._iterations  # other threads may replace them
        expected = ahead[-1] if ahead else None
        if (
            iterations < 2
            or expected is None
            or expected.dataset is not dataset
            or expected.counts != counts
            or not torch.equal(expected.keys, keys)
        ):
            episodes = sample_stacked(dataset, keys, counts)
            elements = sum(tensor.numel() for part in episodes for tensor in part)
            self._iterations = min(_MAX_TASKS // len(keys), _MAX_ELEMENTS // max(1, elements))
            self._ahead = [_Tasks(dataset, counts, keys + _NEXT_ITERATION)]
            return episodes
        if expected.episodes is None:
            ahead = _sample_iterations(dataset, keys, counts, iterations)
        self._ahead, found = ahead[:-1], ahead[-1].episodes
        assert found is not None
        return found


def sample_stacked(dataset: Any, keys: Tensor, counts: Counts) -> Episode:
    """The stacked tasks of some keys of one split.

    Args:
        dataset: a dataset with `episodes`.
        keys: int64 of shape (tasks, 4).
        counts: ways, shots and queries.
    """
    return dataset.episodes(KeyGenerators(keys), key_split(keys[0]), *counts)


def _sample_iterations(dataset: Any, keys: Tensor, counts: Counts, iterations: int) -> list[_Tasks]:
    """The tasks of some iterations, the first one last; before them, the keys of the next one."""
    steps = torch.arange(iterations + 1).view(-1, 1, 1) * _NEXT_ITERATION
    *all_keys, keys_after = (keys + steps).unbind()
    # Copies, because the rounding of products depends on the alignment of memory.
    support, query = (
        [[part.clone() for part in tensor.split(len(keys))] for tensor in examples]
        for examples in sample_stacked(dataset, torch.cat(all_keys), counts)
    )
    ahead = [
        _Tasks(dataset, counts, own, Episode(Examples(*own_support), Examples(*own_query)))
        for own, own_support, own_query in zip(
            all_keys, zip(*support, strict=True), zip(*query, strict=True), strict=True
        )
    ]
    return [_Tasks(dataset, counts, keys_after), *reversed(ahead)]
