"""Sampling of small training tasks in advance."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metadist.errors import UserError
from metadist.tasks.episode import Episode, Examples
from metadist.tasks.generators import KeyGenerators

_MAX_TASKS = 256
_MAX_ELEMENTS = 2**17
"""Bounds of the tasks, and of the elements of their tensors, that are sampled together."""

_NEXT_ITERATION = torch.tensor([0, 0, 1, 0])

Counts = tuple[int, int, int]
"""Ways, shots and queries of a task."""


class TaskSource(NamedTuple):
    """A dataset's method `episodes` with its arguments apart from the generators.

    Sources of the same dataset, device, split and counts are equal.
    """

    episodes: Callable[..., Any]
    device: torch.device
    split: str
    counts: Counts

    def sample(self, keys: Tensor) -> Any:
        """The stacked tasks of keys of the split, int64 of shape (tasks, 4).

        Raises:
            UserError: the dataset gives None.
        """
        episodes = self.episodes(self.device, KeyGenerators(keys), self.split, *self.counts)
        if episodes is None:
            raise UserError(
                "the dataset's method episodes returned None, which looks_ahead = True rules out: "
                "set it to False, or always return the episodes."
            )
        return episodes


class _Tasks(NamedTuple):
    source: TaskSource
    keys: Tensor
    episodes: Episode | None = None


class LookAhead:
    """Samples the tasks of several iterations at once, which takes little longer than those of one.

    It does so when it is asked for the tasks of consecutive iterations, as in training. A task
    depends on its source and key alone, so that the tasks are the same in any case.
    """

    def __init__(self) -> None:
        self._iterations = 1
        # The tasks of the next iterations, the first one last; those of the last are not sampled.
        self._ahead: list[_Tasks] = []

    def __reduce__(self) -> tuple:
        return LookAhead, ()

    def __call__(self, source: TaskSource, keys: Tensor) -> Episode:
        """The stacked tasks of some keys.

        Args:
            source: a source which never gives None, of a dataset that does not change.
            keys: int64 of shape (tasks, 4).
        """
        ahead, iterations = self._ahead, self._iterations  # other threads may replace them
        expected = ahead[-1] if ahead else None
        if (
            iterations < 2
            or expected is None
            or expected.source != source
            or not torch.equal(expected.keys, keys)
        ):
            episodes: Episode = source.sample(keys)
            elements = sum(tensor.numel() for part in episodes for tensor in part)
            self._iterations = min(_MAX_TASKS // len(keys), _MAX_ELEMENTS // max(1, elements))
            self._ahead = [_Tasks(source, keys + _NEXT_ITERATION)]
            return episodes
        if expected.episodes is None:
            ahead = _sample_iterations(source, keys, iterations)
        self._ahead, found = ahead[:-1], ahead[-1].episodes
        assert found is not None
        return found


def _sample_iterations(source: TaskSource, keys: Tensor, iterations: int) -> list[_Tasks]:
    """The tasks of some iterations, the first one last; before them, the keys of the next one."""
    steps = torch.arange(iterations + 1).view(-1, 1, 1) * _NEXT_ITERATION
    *all_keys, keys_after = (keys + steps).unbind()
    # Copies, because the rounding of products depends on the alignment of memory.
    support, query = (
        [[part.clone() for part in tensor.split(len(keys))] for tensor in examples]
        for examples in source.sample(torch.cat(all_keys))
    )
    ahead = [
        _Tasks(source, own, Episode(Examples(*own_support), Examples(*own_query)))
        for own, own_support, own_query in zip(
            all_keys, zip(*support, strict=True), zip(*query, strict=True), strict=True
        )
    ]
    return [_Tasks(source, keys_after), *reversed(ahead)]
