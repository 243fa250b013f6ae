"""Trained models: on new data, and under another protocol."""

from metadist.inference.classifier import FewShotClassifier
from metadist.inference.run_evaluation import evaluate_run
from metadist.training.pretrained import pretrained_weights

__all__ = ["FewShotClassifier", "evaluate_run", "pretrained_weights"]
