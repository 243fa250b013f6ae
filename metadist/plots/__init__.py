"""Plots of training and test, rendered without a display.

Each function takes plain numbers and arrays, writes one PNG file and returns its path.

Names are imported when they are first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
