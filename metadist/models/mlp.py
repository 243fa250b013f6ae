"""Fully connected networks."""

import itertools
import math
from collections.abc import Sequence
from typing import Annotated, cast

from annotated_types import Ge, Lt
from torch import Tensor, nn

from metadist.models.batched_layers import Linear, has_unbatched_linear, norm_relu


class MLP(nn.Module):
    """Linear layers with ReLU between them, applied to flattened inputs.

    MAML's fully connected networks (arXiv 1703.03400) are hidden=[256, 128, 64, 64] with batch norm
    (Omniglot) and hidden=[40, 40] without it (sinusoid). hidden=[] is a linear model.

    Args:
        input_shape: the shape of one input; inputs are flattened.
        outputs: the width of the last layer.
        hidden: the widths of the hidden layers.
        batch_norm: whether batch norm precedes each ReLU.
        running_statistics: whether batch norm keeps running statistics for evaluation.
        dropout: the probability of dropping a feature of the last hidden layer.
        native: whether to use C++ and Triton kernels where they are supported; results are equal up
            to rounding.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        outputs: int,
        hidden: Sequence[Annotated[int, Ge(1)]] = (256, 128, 64, 64),
        batch_norm: bool = True,
        running_statistics: bool = False,
        dropout: Annotated[float, Ge(0), Lt(1)] = 0.0,
        native: bool = True,
    ) -> None:
        super().__init__()
        self.dimensions = len(input_shape)
        self.native = native
        self.running_statistics = batch_norm and running_statistics
        widths = [math.prod(input_shape), *hidden]
        self.layers = nn.ModuleList(
            Linear(before, after, native=native) for before, after in itertools.pairwise(widths)
        )
        self.norms = nn.ModuleList(
            nn.BatchNorm1d(width, track_running_stats=running_statistics)
            if batch_norm
            else nn.Identity()
            for width in hidden
        )
        self.dropout = nn.Dropout(dropout)
        self.head = Linear(widths[-1], outputs, native=native)
        if batch_norm:
            # MAML's initialization, truncated at two standard deviations. Without batch norm,
            # activations would vanish.
            for layer in [*self.layers, self.head]:
                nn.init.trunc_normal_(layer.weight, std=0.01, a=-0.02, b=0.02)
                nn.init.zeros_(layer.bias)

    @property
    def supports_batched_tasks(self) -> bool:
        """Whether tasks can be batched, each with its own parameters."""
        return not (self.running_statistics or self.dropout.p or has_unbatched_linear(self.head))

    def features(self, inputs: Tensor) -> Tensor:
        """The last layer's inputs: (…, n, *input_shape) -> (…, n, features)."""
        features = inputs.flatten(inputs.dim() - self.dimensions)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            features = norm_relu(norm, layer(features), native=self.native)
        return cast(Tensor, self.dropout(features))

    def forward(self, inputs: Tensor) -> Tensor:
        """(…, n, *input_shape) -> (…, n, outputs), with … = tasks if batched."""
        return self.head(self.features(inputs))
