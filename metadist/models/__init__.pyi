from .backbones import Backbone, Timm, Torchvision
from .conv4 import Conv4
from .mlp import MLP
from .resnet12 import ResNet12

__all__ = ["MLP", "Backbone", "Conv4", "ResNet12", "Timm", "Torchvision"]
