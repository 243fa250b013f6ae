"""Sampling of small training tasks in advance."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from metadist.tasks.episode import Episode, Examples

_MAX_TASKS = 256
_MAX_ELEMENTS = 2**16
"""Bounds of the tasks, and of the elements of their inputs, that are sampled together."""

_NEXT_ITERATION = torch.tensor([0, 0, 1, 0])

Counts = tuple[int, int, int]
"""Ways, shots and queries of a task."""


class _Tasks(NamedTuple):
    keys: Tensor
    counts: Counts
    episodes: Episode | None


class LookAhead:
    """Samples the tasks of several iterations at once, which takes little longer than those of one.

    It does so when it is asked for the tasks of consecutive iterations, as in training. A task
    depends on its key and the counts alone, so that the tasks are the same in any case.

    Args:
        sample: the function that samples the tasks of keys of shape (tasks, 4), stacked.
    """

    def __init__(self, sample: Callable[[Tensor, Counts], Episode]) -> None:
        self._sample = sample
        self._iterations = 1
        # The tasks of the next iterations, the first one last; those of the last are not sampled.
        self._ahead: list[_Tasks] = []

    def __call__(self, keys: Tensor, counts: Counts) -> Episode:
        """The stacked tasks of some keys.

        Args:
            keys: int64 of shape (tasks, 4).
            counts: ways, shots and queries.
        """
        ahead = self._ahead  # other threads may replace it
        if not (ahead and ahead[-1].counts == counts and torch.equal(ahead[-1].keys, keys)):
            episodes = self._sample(keys, counts)
            elements = episodes.support.inputs.numel() + episodes.query.inputs.numel()
            iterations = min(_MAX_TASKS // len(keys), _MAX_ELEMENTS // max(1, elements))
            self._iterations = max(1, iterations)
            self._ahead = [_Tasks(keys + _NEXT_ITERATION, counts, None)]
            return episodes
        if ahead[-1].episodes is None:
            ahead = self._sample_iterations(keys, counts, self._iterations)
        self._ahead, found = ahead[:-1], ahead[-1].episodes
        assert found is not None
        return found

    def _sample_iterations(self, keys: Tensor, counts: Counts, iterations: int) -> list[_Tasks]:
        """The tasks of some iterations, in the order of `_ahead`."""
        steps = torch.arange(iterations + 1).view(-1, 1, 1) * _NEXT_ITERATION
        *all_keys, keys_after = (keys + steps).unbind()
        episodes = self._sample(torch.cat(all_keys), counts)
        # Copies, because the rounding of products depends on the alignment of memory.
        support, query = (
            [[part.clone() for part in tensor.split(len(keys))] for tensor in examples]
            for examples in episodes
        )
        ahead = [
            _Tasks(own_keys, counts, Episode(Examples(*own_support), Examples(*own_query)))
            for own_keys, own_support, own_query in zip(
                all_keys, zip(*support, strict=True), zip(*query, strict=True), strict=True
            )
        ]
        return [_Tasks(keys_after, counts, None), *reversed(ahead)]
