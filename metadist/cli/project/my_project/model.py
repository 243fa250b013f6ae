"""A model: one hidden layer."""

import math

from torch import Tensor, nn


class MyModel(nn.Module):
    """A linear layer, a nonlinearity, and a linear head.

    metadist passes `input_shape` and `outputs`; the configuration sets the other arguments.
    Prototypical networks and ANIL use `features` and `head`.

    Args:
        input_shape: the shape of one input.
        outputs: the width of the last layer.
        width: the width of the hidden layer.
    """

    def __init__(self, input_shape: tuple[int, ...], outputs: int, width: int = 64) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), width), nn.Tanh())
        self.head = nn.Linear(width, outputs)

    def features(self, inputs: Tensor) -> Tensor:
        """(n, *input_shape) -> (n, width)."""
        return self.body(inputs)

    def forward(self, inputs: Tensor) -> Tensor:
        """(n, *input_shape) -> (n, outputs)."""
        return self.head(self.features(inputs))
