"""Loggers of a run: console, `metrics.jsonl`, TensorBoard, Weights & Biases and MLflow.

Only rank zero uses them. Heavy libraries are imported when a logger starts.

Names are imported when they are first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
