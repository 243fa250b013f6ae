"""Plots of training and test, rendered without a display.

All functions take plain numbers and arrays. Functions named `plot_…` write one PNG file and return
its path; the other functions return a figure for `report.html`.

Names are imported when they are first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
