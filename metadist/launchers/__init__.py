"""Where processes come from, and the way in for the experiments."""

from metadist.launchers.entry import experiment

__all__ = ["experiment"]
