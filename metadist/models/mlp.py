"""Fully connected networks."""

import itertools
import math
from collections.abc import Sequence
from typing import Annotated

from annotated_types import Ge, Lt
from torch import Tensor, nn


class MLP(nn.Module):
    """Linear layers with ReLU between them, on flattened inputs.

    MAML's networks without convolutions: hidden=[256, 128, 64, 64] with batch norm (Omniglot) and
    hidden=[40, 40] without (sinusoid), arXiv 1703.03400. hidden=[] is a linear model.

    Args:
        input_shape: shape of one input; it is flattened.
        outputs: width of the last layer.
        hidden: widths of the hidden layers.
        batch_norm: normalise each hidden layer, before its ReLU, by the batch's statistics.
        running_statistics: whether batch norm gathers statistics for evaluation.
        dropout: share of the last hidden layer that training drops.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        outputs: int,
        hidden: Sequence[Annotated[int, Ge(1)]] = (256, 128, 64, 64),
        batch_norm: bool = True,
        running_statistics: bool = False,
        dropout: Annotated[float, Ge(0), Lt(1)] = 0.0,
    ) -> None:
        super().__init__()
        widths = [math.prod(input_shape), *hidden]
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(widths):
            layers.append(nn.Linear(before, after))
            if batch_norm:
                layers.append(nn.BatchNorm1d(after, track_running_stats=running_statistics))
            layers.append(nn.ReLU())
        self.body = nn.Sequential(*layers)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(widths[-1], outputs)
        if batch_norm:
            # MAML's initial weights; without batch norm they would let the signal die out.
            for layer in [*layers, self.head]:
                if isinstance(layer, nn.Linear):
                    nn.init.trunc_normal_(layer.weight, std=0.01)
                    nn.init.zeros_(layer.bias)

    def features(self, inputs: Tensor) -> Tensor:
        """What the last layer sees: (n, *input_shape) -> (n, features)."""
        return self.body(inputs.flatten(1))

    def forward(self, inputs: Tensor) -> Tensor:
        """(n, *input_shape) -> (n, outputs)."""
        return self.head(self.dropout(self.features(inputs)))
