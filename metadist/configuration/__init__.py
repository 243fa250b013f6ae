"""From the composed configuration to the objects of an experiment."""

from metadist.configuration.experiment import build_experiment
from metadist.configuration.leftovers import drop_leftovers
from metadist.configuration.nodes import build
from metadist.configuration.saved import load_experiment
from metadist.configuration.shares import share

__all__ = ["build", "build_experiment", "drop_leftovers", "load_experiment", "share"]
