"""From the composed configuration to the objects of an experiment."""

from metadist.config.build import build_experiment
from metadist.config.instantiate import drop_stale_keys, instantiate
from metadist.config.resolvers import fraction, run_stamp
from metadist.config.saved import load_experiment
from metadist.config.schema import Settings, validate

__all__ = [
    "Settings",
    "build_experiment",
    "drop_stale_keys",
    "fraction",
    "instantiate",
    "load_experiment",
    "run_stamp",
    "validate",
]
