"""From the composed configuration to the objects of an experiment."""

from metadist.config.build import build_experiment
from metadist.config.instantiate import instantiate
from metadist.config.overrides import compose, replace_options
from metadist.config.plain import to_plain
from metadist.config.resolvers import fraction, run_stamp
from metadist.config.saved import (
    SavedLearner,
    image_preprocessing,
    load_experiment,
    load_learner,
)
from metadist.config.schema import Settings, validate

__all__ = [
    "SavedLearner",
    "Settings",
    "build_experiment",
    "compose",
    "fraction",
    "image_preprocessing",
    "instantiate",
    "load_experiment",
    "load_learner",
    "replace_options",
    "run_stamp",
    "to_plain",
    "validate",
]
