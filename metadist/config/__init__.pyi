from .build import build_experiment
from .instantiate import instantiate
from .overrides import compose, replace_options
from .plain import to_plain
from .resolvers import fraction, run_stamp
from .saved import SavedLearner, image_preprocessing, load_experiment, load_learner
from .schema import Settings, validate
from .trusted import resolve_external

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
    "resolve_external",
    "run_stamp",
    "to_plain",
    "validate",
]
