"""From the composed configuration to the objects of an experiment."""

from metadist.config.experiment import build_experiment
from metadist.config.leftovers import drop_leftovers
from metadist.config.nodes import build
from metadist.config.saved import load_experiment
from metadist.config.shares import share

__all__ = ["build", "build_experiment", "drop_leftovers", "load_experiment", "share"]
