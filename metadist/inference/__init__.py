"""Trained models on new data."""

from metadist.inference.classifier import FewShotClassifier

__all__ = ["FewShotClassifier"]
