"""Few-shot tasks and the datasets that they are sampled from.

A task distribution is a dataset with a number of ways, shots and queries. The sampled task depends
on a key alone, so every worker samples the same task from the same key.

Names are imported when they are first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
