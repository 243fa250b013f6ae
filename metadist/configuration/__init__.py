"""From the composed configuration to the objects of an experiment."""

from metadist.configuration.meta import build_meta
from metadist.configuration.nodes import build

__all__ = ["build", "build_meta"]
