"""Small tasks in float64: lines with closed-form gradients, and random images."""

from collections.abc import Sequence

import torch
from torch import nn

from metadist.tasks import Episode, Examples


class Scale(nn.Module):
    """y = w x."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[weight]], dtype=torch.float64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs @ self.weight.T


class TwoScales(nn.Module):
    """y = w a x, with a x as features and w as the head."""

    def __init__(self, body: float, head: float) -> None:
        super().__init__()
        self.body = nn.Parameter(torch.tensor(body, dtype=torch.float64))
        self.head = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        nn.init.constant_(self.head.weight, head)

    def features(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.body * inputs

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(inputs))


def line(slope: float, points: Sequence[float]) -> Examples:
    """Points of y = slope x: the squared error of y = w x is mean(x²) (w - slope)²."""
    inputs = torch.tensor(points, dtype=torch.float64).unsqueeze(1)
    return Examples(inputs, slope * inputs)


SLOPE = 3.0
LINES = Episode(line(SLOPE, [1.0, 2.0]), line(SLOPE, [0.5, -1.0, 2.0]))
POWER = 2.5
"""mean(x²) over the support set of `LINES`."""
QUERY_POWER = 1.75
"""mean(x²) over its query set."""


def images(ways: int = 3, shots: int = 2, queries: int = 2, seed: int = 3) -> Episode:
    """A task of random 16×16 images."""
    generator = torch.Generator().manual_seed(seed)

    def part(each: int) -> Examples:
        pixels = torch.rand(ways * each, 1, 16, 16, generator=generator, dtype=torch.float64)
        return Examples(pixels, torch.arange(ways).repeat_interleave(each))

    return Episode(part(shots), part(queries))


def gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    """The gradients of a module's parameters, by name."""
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def assert_equal_gradients(found: dict, expected: dict, tolerance: float = 1e-10) -> None:
    """Same names, and values equal within `tolerance` relative to the largest."""
    assert found.keys() == expected.keys()
    scale = max(each.abs().max() for each in expected.values())
    for name, each in expected.items():
        assert (found[name] - each).abs().max() <= tolerance * scale, name
