"""Networks. Their constructors take `input_shape` and `outputs` first."""

from metadist.models.conv4 import Conv4
from metadist.models.mlp import MLP

__all__ = ["MLP", "Conv4"]
