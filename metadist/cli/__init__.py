"""The command line: Hydra around a run, sweeps, and exit statuses."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
