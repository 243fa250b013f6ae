from .conv4 import Conv4
from .mlp import MLP

__all__ = ["MLP", "Conv4"]
