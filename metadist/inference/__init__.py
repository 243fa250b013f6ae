"""Trained models on new data."""

from metadist.inference.classifier import FewShotClassifier
from metadist.training.pretrained import pretrained_weights

__all__ = ["FewShotClassifier", "pretrained_weights"]
