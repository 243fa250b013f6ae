"""The four-block convolutional network of few-shot learning, in both published forms."""

import itertools
from typing import Annotated, Literal

from annotated_types import Ge, Lt
from torch import Tensor, nn

from metadist.errors import UserError
from metadist.models.block import block
from metadist.models.layers import Conv2d, Linear


class Conv4(nn.Module):
    """Four blocks of a 3×3 convolution, batch norm and ReLU, then a linear layer.

    - pooling="stride": convolutions of stride 2, mean over the last map (Omniglot in MAML,
      arXiv 1703.03400, appendix A.1), or with `flatten` all of it (Reptile's code).
    - pooling="max": convolutions of stride 1, each followed by 2×2 max-pooling, the last map
      flattened (Vinyals et al., arXiv 1606.04080; MiniImageNet in MAML).

    Batch norm normalises by the statistics of the batch at hand, in training and in evaluation,
    and keeps no running ones: MAML's transductive protocol. With `running_statistics` evaluation
    uses those gathered in training.

    Args:
        input_shape: (channels, height, width) of an image.
        outputs: classes to tell apart.
        filters: channels of each convolution.
        pooling: which of the two forms.
        flatten: whether the stride form's linear layer sees the last map instead of its mean.
        running_statistics: whether batch norm gathers statistics for evaluation.
        dropout: share of the features that training drops before the linear layer.
        native: whether to use compiled C++ where it can be (`native`): the numbers are
            the same to rounding.

    Raises:
        UserError: images too small for four halvings.
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
        self.convolutions = nn.ModuleList(
            Conv2d(before, after, 3, stride=stride, padding=1, native=native)
            for before, after in itertools.pairwise(channels)
        )
        self.norms = nn.ModuleList(
            nn.BatchNorm2d(filters, track_running_stats=running_statistics) for _ in range(4)
        )
        features = filters
        if self.flatten:
            down = (lambda side: side // 16) if pooling == "max" else (lambda side: -(-side // 16))
            features *= down(input_shape[1]) * down(input_shape[2])
        self.dropout = nn.Dropout(dropout)
        self.head = Linear(features, outputs, native=native)
        for convolution in self.convolutions:
            nn.init.xavier_uniform_(convolution.weight)
            nn.init.zeros_(convolution.bias)
        nn.init.normal_(self.head.weight, std=0.01)
        nn.init.zeros_(self.head.bias)

    @property
    def supports_batched_tasks(self) -> bool:
        """Whether several tasks can run at once, each with parameters of its own."""
        return not (self.running_statistics or self.dropout.p)

    @property
    def max_batched_elements(self) -> int:
        """How many numbers the images of tasks that run at once on a CPU may have together.

        With more the time goes to memory; in the max-pooling form, whose maps are larger, earlier
        where PyTorch does the work.
        """
        return 2**18 if self.native or self.pooling == "stride" else 2**16

    def features(self, images: Tensor) -> Tensor:
        """What the linear layer sees: (…, n, channels, height, width) -> (…, n, features)."""
        maps = images
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            maps = block(convolution, norm, maps, self.pooling == "max", self.native)
        return maps.flatten(-3) if self.flatten else maps.mean((-2, -1))

    def forward(self, images: Tensor) -> Tensor:
        """Logits: (n, channels, height, width) -> (n, outputs); or side by side, with tasks in
        front of both.
        """
        return self.head(self.dropout(self.features(images)))
