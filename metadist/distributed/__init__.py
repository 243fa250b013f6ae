"""Distributed training as MapReduce: partitioner, mapper, reducer.

torch.distributed is imported in this package alone. Names are imported when they are first used,
so that torch.distributed.rpc and torch.distributed.autograd are imported only by what needs them.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
