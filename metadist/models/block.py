"""A block of a convolutional network."""

from torch import Tensor, nn

from metadist.models.first_block import can_join, joined
from metadist.models.norm_relu import norm_relu


def block(
    convolution: nn.Conv2d, norm: nn.Module, maps: Tensor, pool: bool = False, native: bool = True
) -> Tensor:
    """Convolution, normalisation, ReLU and, with `pool`, the maximum of each 2×2 square.

    Args:
        convolution: of `metadist.models.layers`.
        norm: as of `norm_relu`.
        maps: (…, n, channels, height, width).
        pool: whether to halve height and width, rounded down.
        native: whether to use compiled C++ where it can be.
    """
    if pool and native and can_join(convolution, norm, maps):
        return joined(convolution, norm, maps)
    return norm_relu(norm, convolution(maps), pool, native)
