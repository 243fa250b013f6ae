"""The 12-layer residual network of few-shot learning."""

import itertools
from collections.abc import Sequence
from typing import Annotated

import torch
import torch.nn.functional as F
from annotated_types import Ge, Len, Lt
from torch import Tensor, nn

from metadist.errors import UserError


class ResNet12(nn.Module):
    """ResNet-12: four residual blocks of three 3×3 convolutions, then a linear layer.

    As in MetaOptNet (Lee et al. 2019, arXiv 1904.03758, and its code): convolutions have no bias
    and are followed by batch norm. LeakyReLU 0.1 follows the first convolution, the second, and the
    sum of the third with the 1×1 shortcut. Each block ends with 2×2 max-pooling and dropout, which
    is DropBlock (Ghiasi et al. 2018, arXiv 1810.12890) in the last two blocks. The last feature map
    is averaged (Tian et al. 2020, arXiv 2003.11539) or, with `flatten`, flattened (MetaOptNet).

    - widths=[64, 160, 320, 640]: MetaOptNet, 12.4 million parameters before the linear layer.
    - widths=[64, 128, 256, 512]: Meta-Baseline (Chen et al. 2021, arXiv 2003.04390), 8.0 million.

    DropBlock's rate is constant here; MetaOptNet's code increases it linearly over 40,000 batches.
    Batch norm is the same as in `Conv4`.

    Args:
        input_shape: the shape of an image, (channels, height, width).
        outputs: the number of classes.
        widths: the output channels of the four blocks.
        drop_rate: the probability of dropping a feature after each block; 0.1 in MetaOptNet's code.
        dropblock_size: the side of the squares that DropBlock drops in the last two blocks, in
            pixels; 5 for 84×84 and 2 for 32×32 images in MetaOptNet's code; 1 for plain dropout.
        flatten: whether the last feature map is flattened instead of averaged.
        running_statistics: whether batch norm keeps running statistics for evaluation.

    Raises:
        UserError: inputs are not images, or images are too small to be halved four times.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        outputs: int,
        widths: Annotated[Sequence[Annotated[int, Ge(1)]], Len(4, 4)] = (64, 160, 320, 640),
        drop_rate: Annotated[float, Ge(0), Lt(1)] = 0.0,
        dropblock_size: Annotated[int, Ge(1)] = 1,
        flatten: bool = False,
        running_statistics: bool = False,
    ) -> None:
        super().__init__()
        if len(input_shape) != 3 or min(input_shape[1:]) < 16:
            raise UserError(
                f"model=resnet12 takes images of 16×16 pixels or more, of shape (channels, height, "
                f"width), not {input_shape}; choose model=mlp or conv4 for this dataset."
            )
        self.running_statistics = running_statistics
        self.flatten = flatten
        channels = [input_shape[0], *widths]
        sizes = (1, 1, dropblock_size, dropblock_size)
        self.blocks = nn.Sequential(
            *(
                _Block(before, after, running_statistics, _dropout(drop_rate, size))
                for (before, after), size in zip(itertools.pairwise(channels), sizes, strict=True)
            )
        )
        features = widths[-1]
        if flatten:
            features *= (input_shape[1] // 16) * (input_shape[2] // 16)
        self.head = nn.Linear(features, outputs)
        for module in self.blocks.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(
                    module.weight, a=0.1, mode="fan_out", nonlinearity="leaky_relu"
                )
        nn.init.zeros_(self.head.bias)

    def features(self, images: Tensor) -> Tensor:
        """The linear layer's inputs: (n, channels, height, width) -> (n, features)."""
        features = self.blocks(images)
        return features.flatten(1) if self.flatten else features.mean((-2, -1))

    def forward(self, images: Tensor) -> Tensor:
        """Logits: (n, channels, height, width) -> (n, outputs)."""
        return self.head(self.features(images))


class _Block(nn.Module):
    """Three convolutions and a shortcut, 2×2 max-pooling, dropout."""

    def __init__(
        self, before: int, after: int, running_statistics: bool, dropout: nn.Module
    ) -> None:
        super().__init__()
        channels = [before, after, after, after]
        self.convolutions = nn.ModuleList(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
            for inputs, outputs in itertools.pairwise(channels)
        )
        self.shortcut = nn.Conv2d(before, after, 1, bias=False)
        self.norms = nn.ModuleList(
            nn.BatchNorm2d(after, track_running_stats=running_statistics) for _ in range(4)
        )
        self.dropout = dropout

    def forward(self, images: Tensor) -> Tensor:
        outputs = images
        for index, convolution in enumerate(self.convolutions):
            outputs = F.leaky_relu(outputs, 0.1) if index else outputs
            outputs = self.norms[index](convolution(outputs))
        outputs = F.leaky_relu(outputs + self.norms[3](self.shortcut(images)), 0.1)
        return self.dropout(F.max_pool2d(outputs, 2))


class DropBlock(nn.Module):
    """Dropout of squares of features, as in Ghiasi et al. 2018, arXiv 1810.12890, algorithm 1.

    The remaining features are scaled to keep the mean. In evaluation, DropBlock is the identity.

    Args:
        rate: the probability of dropping a feature; approximate if squares overlap.
        size: the side of the squares; limited to the side of the feature map.
    """

    def __init__(self, rate: float, size: int) -> None:
        super().__init__()
        self.rate = rate
        self.size = size

    def forward(self, features: Tensor) -> Tensor:
        """(n, channels, height, width) -> the same shape."""
        if not self.training:
            return features
        n, channels, height, width = features.shape
        side = min(self.size, height, width)
        rows, columns = height - side + 1, width - side + 1
        gamma = self.rate * height * width / (side**2 * rows * columns)
        corners = features.new_empty(n, channels, rows, columns).bernoulli_(gamma)
        keep = 1 - F.max_pool2d(F.pad(corners, [side - 1] * 4), side, stride=1)
        # In 16 bits the sum would be rounded or overflow.
        kept = keep.sum(dtype=torch.promote_types(features.dtype, torch.float32))
        return features * keep * (keep.numel() / kept.clamp(min=1)).to(features.dtype)


def _dropout(rate: float, size: int) -> nn.Module:
    """DropBlock with squares of `size` pixels; plain dropout if `size` is 1."""
    return nn.Dropout(rate) if size == 1 or not rate else DropBlock(rate, size)
