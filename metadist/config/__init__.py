"""From the composed configuration to the objects of an experiment.

Names are imported when they are first used.
"""

import lazy_loader

import metadist.config.resolvers  # noqa: F401  # registers them with OmegaConf

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
