"""From the composed configuration to the objects of an experiment."""

from metadist.configuration.experiment import build_experiment
from metadist.configuration.nodes import build

__all__ = ["build", "build_experiment"]
