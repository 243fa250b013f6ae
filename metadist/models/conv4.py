"""The four-block convolutional network of few-shot learning, in both published forms."""

import itertools
from collections.abc import Iterable
from typing import Annotated, Literal, cast

from annotated_types import Ge, Lt
from torch import Tensor, nn

from metadist.errors import UserError
from metadist.models.batched_layers import Conv2d, Linear, conv_block, has_unbatched_linear


class Conv4(nn.Module):
    """Four blocks of a 3×3 convolution, batch norm and ReLU, then a linear layer.

    - pooling="stride": convolutions have stride 2. The last feature map is averaged (Omniglot in
      MAML, arXiv 1703.03400, appendix A.1) or, with `flatten`, flattened (Reptile's code).
    - pooling="max": convolutions have stride 1, and each block ends with 2×2 max-pooling. The last
      feature map is flattened (Vinyals et al., arXiv 1606.04080; MiniImageNet in MAML).

    Batch norm uses the statistics of the batch in training and in evaluation, and keeps no running
    statistics (MAML's transductive protocol). With `running_statistics` evaluation uses the running
    statistics of training, except in inner steps (not those of `algorithm=supervised`).

    Args:
        input_shape: the shape of an image, (channels, height, width).
        outputs: the number of classes.
        filters: the output channels of each convolution.
        pooling: the form of the network, "stride" or "max".
        flatten: whether the "stride" form flattens the last feature map instead of averaging it.
        running_statistics: whether batch norm keeps running statistics for evaluation.
        dropout: the probability of dropping a feature, an input of the linear layer.
        native: whether to use C++ and Triton kernels where they are supported; results are equal up
            to rounding.

    Raises:
        UserError: inputs are not images, or images are too small to be halved four times.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        outputs: int,
        filters: Annotated[int, Ge(1)] = 64,
        pooling: Literal["stride", "max"] = "stride",
        flatten: bool = False,
        running_statistics: bool = False,
        dropout: Annotated[float, Ge(0), Lt(1)] = 0.0,
        native: bool = True,
    ) -> None:
        super().__init__()
        if len(input_shape) != 3:
            raise UserError(
                f"model=conv4 takes images of shape (channels, height, width), not {input_shape}; "
                "choose model=mlp for this dataset."
            )
        if pooling not in ("stride", "max"):
            raise UserError(f'model.pooling must be "stride" or "max", got {pooling!r}.')
        if pooling == "max" and min(input_shape[1:]) < 16:
            raise UserError(
                f"model.pooling=max halves an image four times and needs 16×16 pixels or more; "
                f"these have {input_shape[1]}×{input_shape[2]}: choose model.pooling=stride."
            )
        self.pooling = pooling
        self.flatten = flatten or pooling == "max"
        self.native = native
        self.running_statistics = running_statistics
        stride = 2 if pooling == "stride" else 1
        channels = [input_shape[0], filters, filters, filters, filters]
        convolutions = [
            Conv2d(before, after, 3, stride=stride, padding=1, native=native)
            for before, after in itertools.pairwise(channels)
        ]
        self.convolutions = nn.ModuleList(convolutions)
        self.norms = nn.ModuleList(
            nn.BatchNorm2d(filters, track_running_stats=running_statistics) for _ in range(4)
        )
        features = filters
        if self.flatten:
            down = (lambda side: side // 16) if pooling == "max" else (lambda side: -(-side // 16))
            features *= down(input_shape[1]) * down(input_shape[2])
        self.dropout = nn.Dropout(dropout)
        self.head = Linear(features, outputs, native=native)
        for convolution in convolutions:
            nn.init.xavier_uniform_(convolution.weight)
            nn.init.zeros_(cast(Tensor, convolution.bias))  # not None: the default of Conv2d
        nn.init.normal_(self.head.weight, std=0.01)
        nn.init.zeros_(self.head.bias)

    @property
    def supports_batched_tasks(self) -> bool:
        """Whether tasks can be batched, each with its own parameters."""
        return not (self.running_statistics or self.dropout.p or has_unbatched_linear(self.head))

    @property
    def max_batched_elements(self) -> int:
        """The largest number of input elements in a batch of tasks on a CPU.

        Larger batches are limited by memory bandwidth. Without C++ kernels, the "max" form reaches
        this limit earlier.
        """
        return 2**18 if self.native or self.pooling == "stride" else 2**16

    def features(self, images: Tensor) -> Tensor:
        """The linear layer's inputs: (…, n, channels, height, width) -> (…, n, features)."""
        features = images
        convolutions = cast(Iterable[Conv2d], self.convolutions)
        for convolution, norm in zip(convolutions, self.norms, strict=True):
            features = conv_block(convolution, norm, features, self.pooling == "max", self.native)
        features = features.flatten(-3) if self.flatten else features.mean((-2, -1))
        return cast(Tensor, self.dropout(features))

    def forward(self, images: Tensor) -> Tensor:
        """Logits: (…, n, channels, height, width) -> (…, n, outputs), with … = tasks if batched."""
        return self.head(self.features(images))
