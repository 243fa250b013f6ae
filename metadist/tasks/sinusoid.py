"""Regression tasks: sine waves of random amplitude and phase."""

from collections.abc import Sequence

import numpy as np
import torch

from metadist.tasks.episode import SPLITS, Episode, Examples, select_episodes
from metadist.tasks.generators import KeyGenerators

AMPLITUDES = (0.1, 5.0)
PHASES = (0.0, np.pi)
POSITIONS = (-5.0, 5.0)


class Sinusoid:
    """Few-shot regression of `y = amplitude * sin(x - phase)`.

    The experiment of MAML (Finn et al. 2017, arXiv 1703.03400, section 5.1): a task has an
    amplitude uniform in [0.1, 5] and a phase uniform in [0, π]; its points lie uniformly in
    [-5, 5]. The three splits are the same distribution. The number of ways is ignored.

    Attributes:
        input_shape: (1,).
        regression: True.
        looks_ahead: True: tasks of later iterations may be sampled in advance, as the dataset does
            not change in training. Subclasses do not inherit it.
    """

    input_shape: tuple[int, ...] = (1,)
    regression = True
    looks_ahead = True

    def outputs(self, ways: int) -> int:
        """The width of the last layer of a model: 1 for any `ways`."""
        return 1

    def check(
        self,
        ways: int,
        shots: int,
        queries: int,
        splits: Sequence[str] = SPLITS,
        key_prefix: str = "task.",
    ) -> None:
        """Accept any counts: a wave has any number of points."""

    def episode(
        self, generator: np.random.Generator, split: str, ways: int, shots: int, queries: int
    ) -> Episode:
        """Sample a wave and points on it.

        Args:
            generator: the only source of randomness; it is advanced.
            split: ignored.
            ways: ignored.
            shots: the number of support points.
            queries: the number of query points.

        Returns:
            inputs and targets float32 of shape (shots, 1) and (queries, 1).
        """
        uniform = generator.random((1, 2 + shots + queries))
        return select_episodes(_episodes(uniform, shots), 0)

    def episodes(
        self,
        device: torch.device,
        generators: KeyGenerators,
        split: str,
        ways: int,
        shots: int,
        queries: int,
    ) -> Episode:
        """Sample one episode per generator, equal to the one that `episode` samples with it.

        Args:
            device: ignored: episodes are made on the CPU.
            generators: the generators of the tasks.
            split: ignored.
            ways: ignored.
            shots: the number of support points.
            queries: the number of query points.

        Returns:
            The episodes of `episode`, stacked along a leading task dimension.
        """
        return _episodes(generators.random(2 + shots + queries), shots)

    def curve(self, generator: np.random.Generator, positions: np.ndarray) -> np.ndarray:
        """The wave that `episode` samples points of, given an equal generator.

        Args:
            generator: a generator in the state before `episode`; it is advanced.
            positions: the values of x, of any shape.

        Returns:
            The values of y, float64 of the same shape.
        """
        amplitude, phase = generator.uniform(*AMPLITUDES), generator.uniform(*PHASES)
        return amplitude * np.sin(positions - phase)

    def protocol(self) -> dict[str, object]:
        """The dataset's name."""
        return {"dataset": "sinusoid"}


def _episodes(uniform: np.ndarray, shots: int) -> Episode:
    """Waves from numbers in [0, 1): the amplitude, the phase and the positions of each task."""
    amplitude, phase = _scaled(uniform[:, :1], AMPLITUDES), _scaled(uniform[:, 1:2], PHASES)
    positions = _scaled(uniform[:, 2:], POSITIONS)
    points = np.empty((2, *positions.shape, 1), np.float32)
    points[0, ..., 0] = positions
    points[1, ..., 0] = amplitude * np.sin(positions - phase)
    support, query = torch.from_numpy(points).tensor_split((shots,), dim=2)
    return Episode(Examples(*support.contiguous()), Examples(*query.contiguous()))


def _scaled(uniform: np.ndarray, bounds: tuple[float, float]) -> np.ndarray:
    """Scale numbers in [0, 1) to an interval, in the same way as `Generator.uniform`."""
    low, high = bounds
    return low + (high - low) * uniform
